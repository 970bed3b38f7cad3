"""The evaluations of a run from its index, with the numbers that `agentgym eval` and `agentgym compare` print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentgym.rollout.record.task_names import TaskIdentity, distinct_names
from agentgym.rollout.scores.comparison import Scores
from agentgym.rollout.scores.intervals import Interval, mean_interval, success_interval
from agentgym.types import JSON
from agentgym.viewer.index.run_index import RunIndex

__all__ = ["Evaluation", "last_played", "read_evaluation", "read_evaluations"]


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode of an evaluation: its line, the name of its task, and its score; None without a reward."""

    line: int
    task: str
    success: float
    reward: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The episodes that were played in one phase after one step."""

    phase: str
    step: int
    episodes: tuple[PlayedEpisode, ...]

    @property
    def scores(self) -> Scores:
        """Success and reward of the episodes that have a reward, by task."""
        scores: dict[str, list[tuple[float, float]]] = {}
        for episode in self.episodes:
            if episode.reward is not None:
                scores.setdefault(episode.task, []).append((episode.success, episode.reward))
        return scores

    @property
    def lines(self) -> dict[str, int]:
        """The line of the first episode of each task."""
        return {episode.task: episode.line for episode in reversed(self.episodes)}

    def to_json(self) -> dict[str, JSON]:
        """Returns means and 95% intervals over the episodes that have a reward; None if there are none."""
        played = [episode for episode in self.episodes if episode.reward is not None]
        tasks = [episode.task for episode in played]
        successes = [episode.success for episode in played]
        rewards = [episode.reward or 0.0 for episode in played]
        return {
            "phase": self.phase,
            "step": self.step,
            "num_episodes": len(played),
            "num_failed": len(self.episodes) - len(played),
            "success": _mean(successes),
            "success_interval": _ends(success_interval(successes, tasks)),
            "reward_mean": _mean(rewards),
            "reward_mean_interval": _ends(mean_interval(rewards, tasks)),
        }


def read_evaluations(index: RunIndex) -> list[Evaluation]:
    """Returns the evaluations of a run in the order of their steps, that before training first."""
    phases = index.query(  # two ranges, and not `<>`: by these SQLite goes past the episodes of training in its index
        "SELECT DISTINCT phase, step FROM episodes WHERE phase < 'train' OR phase > 'train' ORDER BY step"
    )
    order = sorted(phases, key=lambda pair: (pair[1], pair[0] != "eval_before"))
    return [read_evaluation(index, phase, step) for phase, step in order]


def read_evaluation(index: RunIndex, phase: str, step: int) -> Evaluation:
    """Returns the evaluation of a phase after a step."""
    rows = index.query(
        "SELECT line, success, reward, task, task_env, task_digest FROM episodes "
        "WHERE phase = ? AND step = ? ORDER BY line",
        (phase, step),
    )
    names = distinct_names([TaskIdentity(*row[3:]) for row in rows])
    episodes = [
        PlayedEpisode(line, name, float(bool(success)), reward)
        for (line, success, reward, *_), name in zip(rows, names, strict=True)
    ]
    return Evaluation(phase, step, tuple(episodes))


def last_played(index: RunIndex) -> tuple[str, int] | None:
    """Returns phase and step of the last evaluation, or of the last step without one; None without any episode."""
    for condition in ("phase LIKE 'eval%'", "1"):
        if rows := index.query(f"SELECT phase, step FROM episodes WHERE {condition} ORDER BY line DESC LIMIT 1"):
            return rows[0][0], rows[0][1]
    return None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _ends(interval: Interval | None) -> list[JSON] | None:
    return None if interval is None else interval.ends
