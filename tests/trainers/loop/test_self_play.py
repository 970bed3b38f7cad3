"""Training in self-play: an advantage for each seat, worked by hand, and nothing from a frozen rival."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentgym.embedded import embedded_folder
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.errors import AgentGymError, ConfigError
from agentgym.evaluation import EvalConfig, evaluate, verify_run
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.rollout.sampling.group_stream import GroupRequest
from agentgym.rollout.sampling.sampler import SamplerConfig
from agentgym.trainers.batch.credits import credit_groups
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.self_play import SeatedEpisodes, seat_metrics
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task


class Alone(TextEnv):
    """An environment of one agent whose opponent has a name that means something elsewhere."""

    def __init__(self, render_mode: str | None = None, opponent: str = "self") -> None:
        super().__init__(render_mode)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Begins."""
        return "", {}

    def step(self, action: str) -> StepResult:
        """Ends."""
        return "", 0.0, True, False, {}


TASK = Task("TicTacToe-v0", 5, kwargs={"opponent": "self"})


def trajectory(group: str, member: int, reward: float, draw: float) -> Trajectory:
    """One reply of two ids, of a finished game."""
    span = TokenSpan((7, 8), Source.POLICY, logprobs=(-0.5, -0.25), policy_versions=(0, 0))
    return Trajectory(
        task=TASK,
        group=group,
        member=member,
        rows=(Row((TokenSpan((1,), Source.PROMPT), span)),),
        turns=(Turn(Message("assistant", "5"), reward),),
        status=Status.COMPLETED,
        stop_reason=StopReason.TERMINATED,
        metrics={"success": float(reward == 1.0), "draw": draw},
    )


def test_each_seat_is_held_against_the_same_seat_of_the_other_games() -> None:
    """Three games: X wins, a draw, O wins. X earned 1, 0.5, 0, which has the mean 0.5 and the deviation 0.5: its
    advantages are 1, 0, -1; O's are -1, 0, 1. One group of all six would have given 1.118 in place of 1."""
    seated = SeatedEpisodes([GroupRequest(TASK, "1/0", 1)], ("X", "O"), rotates=False)
    episodes = seated.episodes(3, run_seed=0)
    assert [(episode.group, episode.member, episode.seat) for episode in episodes[:3]] == [
        ("1/0:X", 0, "X"),
        ("1/0:O", 0, "O"),
        ("1/0:X", 1, "X"),
    ]
    earned = [1.0, 0.0, 0.5, 0.5, 0.0, 1.0]
    played = [
        trajectory(episode.group, episode.member, reward, float(reward == 0.5))
        for episode, reward in zip(episodes, earned, strict=True)
    ]
    groups = seated.groups(played)
    assert [(group.id, len(group.trajectories)) for group in groups] == [("1/0:X", 3), ("1/0:O", 3)]
    cross, nought = credit_groups(groups, "grpo")
    assert cross.means == pytest.approx((1.0, 0.0, -1.0), abs=1e-5)
    assert nought.means == pytest.approx((-1.0, 0.0, 1.0), abs=1e-5)
    assert seat_metrics(groups, ("X", "O")) == {
        "win/X": 0.3333,
        "draw/X": 0.3333,
        "reward_mean/X": 0.5,
        "win/O": 0.3333,
        "draw/O": 0.3333,
        "reward_mean/O": 0.5,
    }


def test_with_a_rival_another_seat_is_trained_from_task_to_task() -> None:
    seated = SeatedEpisodes([GroupRequest(TASK, f"1/{n}", 1) for n in range(3)], ("X", "O"), rotates=True)
    episodes = seated.episodes(2, run_seed=0)
    assert [episode.group for episode in episodes] == ["1/0:X", "1/0:X", "1/1:O", "1/1:O", "1/2:X", "1/2:X"]


def test_with_a_rival_a_step_of_one_task_trains_each_seat_in_its_turn() -> None:
    for num_tasks in (1, 2, 3):
        trained: Counter[str] = Counter()
        for step in range(1, 7):
            requests = [GroupRequest(TASK, f"{step}/{place}", step) for place in range(num_tasks)]
            seated = SeatedEpisodes(requests, ("X", "O", "Z"), rotates=True)
            trained.update(episode.seat for episode in seated.episodes(1, run_seed=0))
        assert set(trained.values()) == {2 * num_tasks}


def config(**settings: Any) -> TrainConfig:
    chosen: dict[str, Any] = {
        "env": "TicTacToe-v0",
        "env_kwargs": {"opponent": "self"},
        "steps": 1,
        "tasks": 2,
        "group_size": 2,
        "eval": HeldOutConfig(episodes=0),
        "limits": Limits(max_turns=3, turn_tokens=4, cut_reply="answer"),
    }
    return TrainConfig(**{**chosen, **settings})


def test_a_run_records_two_trajectories_of_each_game(tmp_path: Path) -> None:
    Trainer(config(), tmp_path / "run").fit()
    played = [record.trajectory for record in read_episodes(tmp_path / "run")]
    assert [(trajectory.group, trajectory.member) for trajectory in played] == [
        (f"1/{task}:{seat}", game) for task in range(2) for seat in "XO" for game in range(2)
    ]
    assert verify_run(tmp_path / "run").ok
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"win/X", "reward_mean/X"} <= set(step)  # there is no O where X only talks, and no draw
    assert step["episodes"] == 8


@pytest.mark.long
def test_a_frozen_rival_adds_no_row_to_the_loss(tmp_path: Path) -> None:
    Trainer(config(rival=str(embedded_folder())), tmp_path / "run").fit()
    played = [record.trajectory for record in read_episodes(tmp_path / "run")]
    assert [(trajectory.group, trajectory.member) for trajectory in played] == [
        ("1/0:X", 0),
        ("1/0:X", 1),
        ("1/1:O", 0),
        ("1/1:O", 1),
    ]
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["episodes"] == 4
    assert step["trained_tokens"] == sum(
        trajectory.num_trained_tokens for trajectory in played if trajectory.status.trainable
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_staleness": 1}, "does not go with max_staleness"),
        ({"serve": 0}, "does not go with serve"),
        ({"sampler": SamplerConfig(env_processes=1)}, "does not go with sampler.env_processes"),
        ({"algo": "remax"}, "does not go with the advantage remax"),
        ({"sampler": SamplerConfig(concurrency=1)}, "takes sampler.concurrency of at least 2, got 1"),
        ({"env": f"{__name__}:Alone", "rival": "."}, "a rival plays the other seats of a game in self-play, and "),
        ({"env_kwargs": {}, "rival": "."}, "add --env-kwargs opponent=self"),
        ({"rival": "oracle"}, "--env-kwargs opponent=oracle"),
        ({"rival": "nowhere"}, "there is no model in 'nowhere'"),
    ],
)
def test_settings_that_do_not_go_with_self_play_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(AgentGymError, match=message):
        Trainer(config(**settings), tmp_path / "run").fit()
    assert not (tmp_path / "run").exists()


def test_an_evaluation_needs_an_opponent() -> None:
    with pytest.raises(ConfigError, match="name another opponent, such as --env-kwargs opponent=random"):
        evaluate(EvalConfig(env="TicTacToe-v0", env_kwargs={"opponent": "self"}, policy="oracle"))
