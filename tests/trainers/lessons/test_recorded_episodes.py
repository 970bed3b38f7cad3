"""Rejection sampling: which recorded episodes are learned, and that it is by their exact ids."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.errors import ConfigError, RunFolderError
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.trainers.lessons.recorded_episodes import choose_episodes, episode_rows, held_out_lines, read_played
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

SAMPLED = TokenSpan((66, 67, 300), Source.POLICY, (-0.1, -0.2, -0.3), (0, 0, 0))


def episode(
    seed: int,
    member: int,
    reward: float | None,
    *,
    rows: tuple[Row, ...] | None = None,
    success: bool | None = None,
) -> Trajectory:
    failed = reward is None
    rows = (Row((TokenSpan((5, 6), Source.PROMPT), SAMPLED)),) if rows is None else rows
    return Trajectory(
        task=Task("Some-v0", seed),
        group=f"0/{seed}",
        member=member,
        rows=rows,
        turns=tuple(Turn(Message("assistant", "hi"), reward) for _ in rows or (0,)),
        status=Status.ENV_ERROR if failed else Status.COMPLETED,
        stop_reason=StopReason.ENV_ERROR if failed else StopReason.TERMINATED,
        metrics={} if success is None else {"success": float(success)},
        error="boom" if failed else None,
    )


@pytest.fixture(scope="module")
def renderer(tokenizer_folder: Path) -> Renderer:
    return renderer_for(tokenizer_folder)


def test_without_a_least_reward_success_decides() -> None:
    played = [episode(1, 0, 0.5, success=False), episode(1, 1, 0.1, success=True), episode(1, 2, None)]
    chosen = choose_episodes(played)
    assert chosen.episodes == (played[1],)
    assert chosen.dropped == {"without success": 1, "failed, without a reward": 1}


def test_a_least_reward_is_enough_and_the_best_of_each_task_are_kept_in_their_order() -> None:
    rewards = [(1, 0.5), (2, 1.0), (1, 0.9), (1, 0.4), (1, 0.9), (2, 0.2), (1, 0.7)]
    played = [episode(seed, member, reward) for member, (seed, reward) in enumerate(rewards)]
    chosen = choose_episodes(played, min_reward=0.4, best_per_task=2)
    assert [episode.member for episode in chosen.episodes] == [1, 2, 4]
    assert chosen.dropped == {"with a reward below 0.4": 1, "beyond the best 2 of their task": 3}
    assert choose_episodes(played, min_reward=0.4).dropped == {"with a reward below 0.4": 1}
    with pytest.raises(ConfigError, match="at least 1"):
        choose_episodes(played, best_per_task=0)


def test_episodes_without_ids_or_without_a_trained_id_are_left_out() -> None:
    aside = TokenSpan((66, 300), Source.POLICY, (-0.1, -0.2), (0, 0), excluded="summary")
    played = [episode(1, 0, 1.0, rows=()), episode(1, 1, 1.0, rows=(Row((TokenSpan((5,), Source.PROMPT), aside)),))]
    reasons = choose_episodes(played).dropped
    assert Counter(reasons.values()) == {1: 2}
    assert "without token ids (a chat endpoint played them, or record.tokens was false)" in reasons


def test_held_out_tasks_are_counted_and_measurements_of_training_are_not_read(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path) as writer:
        writer.write([episode(7, 0, 1.0)], phase="train")
        writer.write([episode(EVAL_SEED_START, 0, 1.0)], phase="eval")
        writer.write([episode(EVAL_SEED_START, 0, 1.0)], phase="eval_before")
        writer.write([episode(EVAL_SEED_START, 0, 1.0)], phase="eval_after")
    played = read_played([tmp_path])
    assert [episode.task.seed for episode in played] == [7, EVAL_SEED_START]
    assert held_out_lines(choose_episodes(played).episodes) == [
        "1 of the learned episodes are of held-out tasks: evaluations on those say nothing any more"
    ]
    with pytest.raises(RunFolderError, match="does not exist"):
        read_played([tmp_path / "absent"])


def test_rows_hold_the_recorded_ids_and_not_those_of_a_new_encoding(renderer: Renderer) -> None:
    ids = renderer.render([Message("user", "Hi")])
    spelled = tuple(renderer.render([Message("user", "Hi")])[-3:])  # ids that nobody would get by encoding a reply
    sampled = TokenSpan(spelled, Source.POLICY, (-0.1,) * 3, (0,) * 3)
    answer = TokenSpan((7, 8), Source.ENV)
    aside = TokenSpan((9,), Source.POLICY, (-0.1,), (0,), excluded="summary")
    row = Row((TokenSpan(tuple(ids), Source.PROMPT), sampled, answer, aside, answer, sampled))
    trajectory = Trajectory(
        Task("Some-v0", 1), "g", 0, (row,), tuple(Turn(Message("assistant", "x"), 1.0) for _ in range(3)),
        Status.COMPLETED, StopReason.TERMINATED,
    )  # fmt: skip
    (learned_row,) = episode_rows(renderer, renderer.vocab_size, trajectory)
    assert learned_row.ids == (*ids, *spelled, 7, 8, 9, 7, 8, *spelled)
    assert learned_row.mask == (False,) * len(ids) + (True,) * 3 + (False,) * 5 + (True,) * 3
    assert learned_row.success is True


def test_ids_of_another_tokenizer_are_refused(renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="the id 300, and the model has"):
        episode_rows(renderer, 300, episode(1, 0, 1.0))
    reply = TokenSpan((66, 67), Source.POLICY, (-0.1, -0.2), (0, 0))
    shifted = tuple(index + 1 for index in renderer.render([Message("user", "Where are you?")])[4:-4])
    talk = (Message("user", "Where are you?"),)
    with pytest.raises(ConfigError, match="reads its ids as something else"):
        episode_rows(renderer, 10**6, episode(1, 0, 1.0, rows=(Row((TokenSpan(shifted, Source.PROMPT), reply), talk),)))
    own = tuple(renderer.render(talk))
    assert episode_rows(renderer, 10**6, episode(1, 0, 1.0, rows=(Row((TokenSpan(own, Source.PROMPT), reply), talk),)))
    beyond = renderer.vocab_size + 3
    with pytest.raises(ConfigError, match=f"the id {beyond}, and the model has {renderer.vocab_size}"):
        prompt = TokenSpan((*own, beyond), Source.PROMPT)
        episode_rows(renderer, 10**6, episode(1, 0, 1.0, rows=(Row((prompt, reply), talk),)))


def test_a_sampled_id_that_pads_the_vocabulary_of_the_model_is_learned(renderer: Renderer) -> None:
    talk = (Message("user", "Where are you?"),)
    padding = TokenSpan((66, renderer.vocab_size + 3), Source.POLICY, (-0.1, -9.0), (0, 0))
    row = Row((TokenSpan(tuple(renderer.render(talk)), Source.PROMPT), padding), talk)
    (learned_row,) = episode_rows(renderer, renderer.vocab_size + 8, episode(1, 0, 1.0, rows=(row,)))
    assert learned_row.ids[-1] == renderer.vocab_size + 3
    with pytest.raises(ConfigError, match="the id"):
        episode_rows(renderer, renderer.vocab_size, episode(1, 0, 1.0, rows=(row,)))
