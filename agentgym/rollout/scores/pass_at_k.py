"""Scores of repeated tasks: how often one of k succeeds, how often all k succeed, and the best reward of k.

Each is the mean over all choices of k among a task's n episodes, in closed form, so none is biased.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentgym.errors import ConfigError
from agentgym.rollout.record.task_names import task_names
from agentgym.rollout.scores.intervals import ANY_REWARD, ZERO_OR_ONE, Interval, mean_interval, share_interval
from agentgym.trajectory import Trajectory
from agentgym.types import JSON

__all__ = ["AtK", "RepeatScores", "best_at_k", "difficulty_of", "pass_at_k", "pass_hat_k", "repeat_scores"]

DIFFICULTY = "difficulty"
LEVELS = (DIFFICULTY, "level")


@dataclass(frozen=True, kw_only=True, slots=True)
class AtK:
    """The numbers of one k, each the mean over the tasks that have at least k episodes; None if there is no task."""

    k: int
    num_tasks: int
    """The number of tasks with at least k episodes that have a reward."""
    num_short: int
    """The number of tasks with fewer, which count in none of these numbers."""
    pass_at_k: float | None
    """The probability that at least one of k episodes succeeds."""
    pass_at_k_interval: Interval | None
    """`share_interval` over tasks, as for pass^k: tasks are the independent draws, their episodes are not."""
    pass_hat_k: float | None
    """The probability that all of k episodes succeed: pass^k."""
    pass_hat_k_interval: Interval | None
    best_at_k: float | None
    """The best reward among k episodes."""
    best_at_k_interval: Interval | None
    """`share_interval` of rewards of 0 and 1, and `mean_interval` of others; None for fewer than two tasks."""

    def to_json(self) -> dict[str, JSON]:
        """Returns a flat object; intervals are `[low, high]`."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value.ends if isinstance(value, Interval) else value for name, value in values.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatScores:
    """The numbers of some tasks for k = 1, 2, 4, ... and the greatest number of episodes of a task."""

    env: str | None
    """The environment of the tasks; None if there are several."""
    difficulty: str | None
    """The difficulty of the tasks (see `difficulty_of`); None if it is unknown, or there are several."""
    num_tasks: int
    num_episodes: int
    """The number of episodes that have a reward."""
    num_failed: int
    """The number of episodes without a reward, which count nowhere else."""
    at: tuple[AtK, ...]

    def to_json(self) -> dict[str, JSON]:
        """Returns the scores as a JSON object, `k` a list in the order of k."""
        return {
            "env": self.env,
            "difficulty": self.difficulty,
            "num_tasks": self.num_tasks,
            "num_episodes": self.num_episodes,
            "num_failed": self.num_failed,
            "k": [at.to_json() for at in self.at],
        }


def pass_at_k(num: int, num_won: int, k: int) -> float:
    """Computes pass@k, `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, equation 1).

    It is the share of the choices of k among n episodes, of which c succeeded, that hold a success.
    """
    _check(num, k, num_won)
    return 1.0 - math.comb(num - num_won, k) / math.comb(num, k)


def pass_hat_k(num: int, num_won: int, k: int) -> float:
    """Computes pass^k, `C(c, k) / C(n, k)` (Yao et al. 2024, tau-bench).

    It is the share of the choices of k among n episodes, of which c succeeded, that hold only successes.
    """
    _check(num, k, num_won)
    return math.comb(num_won, k) / math.comb(num, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Computes the mean of the largest reward over all choices of k episodes.

    The i-th smallest of n rewards is the largest of `C(i - 1, k - 1)` among `C(n, k)` choices. With rewards 0 and 1 it
    is pass@k. verl's best@k draws with replacement, which gives 0.65 for one success among 8 at k = 8; this gives 1.
    """
    _check(len(rewards), k)
    weights = (math.comb(index, k - 1) / math.comb(len(rewards), k) for index in range(len(rewards)))
    return math.fsum(weight * reward for weight, reward in zip(weights, sorted(rewards), strict=True))


def _check(num: int, k: int, num_won: int = 0) -> None:
    if not 1 <= k <= num:
        raise ConfigError(f"k is between 1 and the {num} episodes of the task, got {k}")
    if not 0 <= num_won <= num:
        raise ConfigError(f"of {num} episodes between 0 and {num} succeed, got {num_won}")


def repeat_scores(
    trajectories: Sequence[Trajectory], reward_range: tuple[float, float] = ANY_REWARD
) -> tuple[RepeatScores, ...]:
    """Returns the scores of all tasks, then of each environment and each of its difficulties, if there are several.

    Equal tasks of several seeds are one task. The result is empty without trajectories.
    """
    tasks: dict[str, list[Trajectory]] = {}
    for name, trajectory in zip(task_names(trajectories), trajectories, strict=True):
        tasks.setdefault(name, []).append(trajectory)
    by_env: dict[str, list[list[Trajectory]]] = {}
    for episodes in tasks.values():
        by_env.setdefault(episodes[0].task.env_id, []).append(episodes)
    several = len(by_env) > 1
    scores = [_scores(None, None, list(tasks.values()), reward_range)] if several else []
    for env, members in by_env.items():
        by_difficulty: dict[str | None, list[list[Trajectory]]] = {}
        for episodes in members:
            by_difficulty.setdefault(_task_difficulty(episodes), []).append(episodes)
        shared = next(iter(by_difficulty)) if len(by_difficulty) == 1 else None
        scores.append(_scores(env, shared, members, reward_range))
        if len(by_difficulty) > 1:
            names = sorted(by_difficulty, key=_difficulty_order)
            scores += [_scores(env, name, by_difficulty[name], reward_range) for name in names if name is not None]
    return tuple(scores)


def difficulty_of(trajectory: Trajectory) -> str | None:
    """Returns the difficulty of the episode's task as text, or None.

    It is `metrics["difficulty"]` or `info["difficulty"]` of the environment, else `difficulty` or `level` of the task's
    reset options, of their `extra_info` (a row's own columns), or of the environment's keywords.
    """
    task = trajectory.task
    row = task.options.get("extra_info")
    env_sources = [(trajectory.metrics, (DIFFICULTY,)), (trajectory.info, (DIFFICULTY,))]
    task_sources = [(source, LEVELS) for source in (task.options, row, task.kwargs) if isinstance(source, Mapping)]
    for source, names in [*env_sources, *task_sources]:
        for value in (source.get(name) for name in names):
            if isinstance(value, str):
                return value
            if isinstance(value, int | float) and not isinstance(value, bool):
                return f"{value:g}"
    return None


def _task_difficulty(episodes: Sequence[Trajectory]) -> str | None:
    """Returns the difficulty by the first of a task's episodes that has one; a failed one may have none."""
    played = sorted(episodes, key=lambda episode: (not episode.status.trainable, episode.member))
    return next((difficulty for difficulty in map(difficulty_of, played) if difficulty is not None), None)


def _difficulty_order(name: str | None) -> tuple[bool, float, str]:
    """Sorts numbers by size, then texts by their letters."""
    try:
        return False, float(name or ""), ""
    except ValueError:
        return True, 0.0, name or ""


def _scores(
    env: str | None,
    difficulty: str | None,
    tasks: Sequence[Sequence[Trajectory]],
    reward_range: tuple[float, float],
) -> RepeatScores:
    played = [[episode for episode in episodes if episode.reward is not None] for episodes in tasks]
    num_episodes = sum(map(len, played))
    max_episodes = max(Counter(episode.task.key for episodes in tasks for episode in episodes).values())
    ks = sorted({*(1 << power for power in range(max_episodes.bit_length())), max_episodes})
    return RepeatScores(
        env=env,
        difficulty=difficulty,
        num_tasks=len(tasks),
        num_episodes=num_episodes,
        num_failed=sum(map(len, tasks)) - num_episodes,
        at=tuple(_at(k, played, reward_range) for k in ks),
    )


def _at(k: int, tasks: Sequence[Sequence[Trajectory]], reward_range: tuple[float, float]) -> AtK:
    long = [episodes for episodes in tasks if len(episodes) >= k]
    counts = [(len(episodes), sum(bool(episode.success) for episode in episodes)) for episodes in long]
    once = [pass_at_k(num, num_won, k) for num, num_won in counts]
    always = [pass_hat_k(num, num_won, k) for num, num_won in counts]
    rewards = [[episode.reward or 0.0 for episode in episodes] for episodes in long]
    best = [best_at_k(own, k) for own in rewards]
    is_share = len(best) > 1 and {reward for own in rewards for reward in own} <= ZERO_OR_ONE
    names = [str(index) for index in range(len(best))]
    return AtK(
        k=k,
        num_tasks=len(long),
        num_short=len(tasks) - len(long),
        pass_at_k=_mean(once),
        pass_at_k_interval=share_interval(once),
        pass_hat_k=_mean(always),
        pass_hat_k_interval=share_interval(always),
        best_at_k=_mean(best),
        best_at_k_interval=share_interval(best) if is_share else mean_interval(best, names, reward_range),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
