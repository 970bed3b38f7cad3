"""Recorded episodes to learn from (rejection sampling): the good ones, with the exact ids that were sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.errors import ConfigError
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trainers.lessons.demonstrations import Demonstration
from agentgym.trajectory import Row, Trajectory

__all__ = ["Chosen", "choose_episodes", "episode_rows", "held_out_lines", "read_played"]

HELD_OUT = ("eval_before", "eval_during", "eval_after")
"""The phases of a training run that only measure it."""
HARM = "evaluations on those say nothing any more"


@dataclass(frozen=True)
class Chosen:
    """The episodes to learn from, and the number of dropped ones by reason."""

    episodes: tuple[Trajectory, ...]
    dropped: Mapping[str, int]


def read_played(runs: Iterable[Path]) -> list[Trajectory]:
    """Returns the episodes of run folders, without those that measured a training run; raises RunFolderError."""
    return [record.trajectory for run in runs for record in read_episodes(run) if record.phase not in HELD_OUT]


def held_out_lines(episodes: Iterable[Trajectory]) -> list[str]:
    """Returns a line with the number of these learned episodes that are on held-out tasks, or none if none is."""
    number = sum(episode.task.seed >= EVAL_SEED_START for episode in episodes)
    return [f"{number} of the learned episodes are of held-out tasks: {HARM}"] if number else []


def choose_episodes(
    episodes: Iterable[Trajectory], min_reward: float | None = None, best_per_task: int | None = None
) -> Chosen:
    """Chooses the episodes with at least `min_reward`, or if that is None those that succeeded.

    Of each task, at most the `best_per_task` with the greatest rewards are chosen, and of equal ones the first.
    """
    if best_per_task is not None and best_per_task < 1:
        raise ConfigError(f"best_per_task is at least 1, got {best_per_task}")
    dropped: Counter[str] = Counter()
    good: list[Trajectory] = []
    for episode in episodes:
        reason = _refusal(episode, min_reward)
        if reason:
            dropped[reason] += 1
        else:
            good.append(episode)
    if best_per_task is not None:
        ranks: Counter[str] = Counter()
        best: set[int] = set()
        for place in sorted(range(len(good)), key=lambda place: -(good[place].reward or 0.0)):
            ranks[good[place].task.key] += 1
            if ranks[good[place].task.key] <= best_per_task:
                best.add(place)
        dropped[f"beyond the best {best_per_task} of their task"] += len(good) - len(best)
        good = [episode for place, episode in enumerate(good) if place in best]
    return Chosen(tuple(good), +dropped)


def episode_rows(renderer: Renderer, vocab_size: int, episode: Trajectory) -> list[Demonstration]:
    """Returns the episode's rows as they were recorded; the ids that the training loss counts are learned.

    Raises ConfigError for ids of another tokenizer: out of range, or decoded by this one to a text other than the
    messages that the prompt was rendered from.
    """
    for row in episode.rows:
        _check_ids(renderer, vocab_size, row)
    rows = [row for row in episode.rows if row.num_trained_tokens]
    return [Demonstration(tuple(row.ids.tolist()), tuple(row.mask.tolist()), bool(episode.success)) for row in rows]


def _refusal(episode: Trajectory, min_reward: float | None) -> str:
    """Returns the reason that an episode is not learned; empty if it is."""
    if episode.reward is None:
        return "failed, without a reward"
    if min_reward is None and not episode.success:
        return "without success"
    if min_reward is not None and episode.reward < min_reward:
        return f"with a reward below {min_reward:g}"
    if not episode.has_ids:
        return "without token ids (a chat endpoint played them, or record.tokens was false)"
    if not episode.num_trained_tokens:
        return "without a sampled id that may be trained"
    return ""


def _check_ids(renderer: Renderer, vocab_size: int, row: Row) -> None:
    context_ids = row.ids[~row.mask]  # a model may sample an id that pads its vocabulary, beyond those of the tokenizer
    for ids, size in ((row.ids, vocab_size), (context_ids, min(vocab_size, renderer.vocab_size))):
        if ids.size and int(ids.max()) >= size:
            raise ConfigError(
                f"it holds the id {int(ids.max())}, and the model has {size}: recorded ids are learned by the model"
                " that has their tokenizer"
            )
    tool_texts = [
        message.content.strip()
        for message in row.messages or ()
        if message.role in ("system", "user") and message.content.strip()
    ]
    if tool_texts and not any(text in renderer.decode(list(row.spans[0].ids)) for text in tool_texts):
        raise ConfigError(
            "the model's tokenizer reads its ids as something else than what was said: recorded ids are learned by the"
            " model that has their tokenizer"
        )
