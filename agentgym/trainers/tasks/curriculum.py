"""Tasks of several levels, whose shares follow the success of recent groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from typing import Protocol, cast

from agentgym.errors import ConfigError
from agentgym.rollout.seeds import derive
from agentgym.trainers.tasks.filtering import success_rate
from agentgym.trainers.tasks.source import TaskSource
from agentgym.trajectory import Group
from agentgym.types import JSON, Task

__all__ = ["CURRICULA", "Curriculum", "CurriculumTasks", "Learnability", "Thresholds"]


class Curriculum(Protocol):
    """Decides how much of each level is trained, by its results."""

    def shares(self) -> Sequence[float]:
        """Returns the share of each level in the next step, the easiest first; their sum is 1."""

    def observe(self, successes: Sequence[Sequence[float]]) -> None:
        """Takes a step's results: for each level, the success of each of its groups."""

    def state(self) -> Mapping[str, JSON]:
        """Returns the state that `load` takes."""

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state`."""


@dataclass
class Thresholds:
    """One level at a time, moved by thresholds on the success of its last groups.

    Automatic domain randomization: OpenAI et al. (2019), Solving Rubik's Cube with a Robot Hand, arXiv:1910.07113,
    algorithm 1. Results are collected in a buffer; once it is full, a mean of at least the high threshold makes the
    task harder, one of at most the low threshold easier, and the buffer is emptied. Differences: the level is one value
    and not a range that grows at both ends, and a buffer with a mean in between slides instead of being emptied.
    """

    num_levels: int
    _: KW_ONLY
    raise_at: float = 0.8
    """The success of the last groups at or above which it moves to the next level."""
    lower_at: float = 0.2
    """The success at or below which it moves to the level before."""
    window: int = 16
    """The number of groups of a level before it may be left."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.lower_at < self.raise_at <= 1.0:
            raise ConfigError(
                "a curriculum takes 0 <= lower_at < raise_at <= 1, which are rates of success; got"
                f" {self.lower_at:g} and {self.raise_at:g}"
            )
        if self.window < 1:
            raise ConfigError(f"a curriculum's window is a number of groups of at least 1, got {self.window}")
        self._level = 0
        self._recent: deque[float] = deque(maxlen=self.window)

    def shares(self) -> Sequence[float]:
        """Returns 1 for the current level and 0 for the others."""
        return [float(level == self._level) for level in range(self.num_levels)]

    def observe(self, successes: Sequence[Sequence[float]]) -> None:
        """Takes a step's results; groups of other levels, sampled before the last move or replayed, do not count."""
        self._recent.extend(successes[self._level])
        if len(self._recent) < self.window:
            return
        mean = sum(self._recent) / len(self._recent)
        move = int(mean >= self.raise_at) - int(mean <= self.lower_at)
        level = min(max(self._level + move, 0), self.num_levels - 1)
        if level != self._level:
            self._level = level
            self._recent.clear()

    def state(self) -> Mapping[str, JSON]:
        """Returns the level and its last results."""
        return {"level": self._level, "recent": list(self._recent)}

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state`."""
        self._level = cast(int, state["level"])
        self._recent = deque(cast(Sequence[float], state["recent"]), maxlen=self.window)


@dataclass
class Learnability:
    """All levels at once, each by p(1 - p): the variance of its success, which is greatest at 0.5.

    Sampling for learnability: Rutherford et al. (2024), No Regrets, arXiv:2408.15099, and for language
    models Foster et al. (2025), Learning to Reason at the Frontier of Learnability, arXiv:2502.12272. Differences: it
    weighs levels and not single tasks, and p is a running estimate instead of extra episodes: the mean over past
    groups, whose weights decay by `keep` per step, and one pseudo-success and one pseudo-failure (so a level that was
    not played lately drifts back to p = 0.5 and is tried again). Every level gets `explore / levels` in any case.
    """

    num_levels: int
    _: KW_ONLY
    explore: float = 0.1
    """The share of tasks that is divided equally among all levels."""
    keep: float = 0.9
    """The factor by which a group's weight in its level's success is multiplied after each step."""

    def __post_init__(self) -> None:
        if not 0.0 < self.explore <= 1.0:
            raise ConfigError(f"a curriculum's explore is in (0, 1], got {self.explore:g}: each level needs some")
        if not 0.0 < self.keep < 1.0:
            raise ConfigError(f"a curriculum's keep is a share in (0, 1), got {self.keep:g}")
        self._counts = [0.0] * self.num_levels
        self._wins = [0.0] * self.num_levels

    def shares(self) -> Sequence[float]:
        """Returns `explore / levels + (1 - explore) p(1 - p) / sum` for each level."""
        rates = [(wins + 1) / (count + 2) for wins, count in zip(self._wins, self._counts, strict=True)]
        scores = [rate * (1 - rate) for rate in rates]
        explore, total = self.explore, sum(scores)
        return [explore / len(scores) + (1 - explore) * score / total for score in scores]

    def observe(self, successes: Sequence[Sequence[float]]) -> None:
        """Takes a step's results; each group counts once."""
        keep = self.keep
        self._counts = [keep * count + len(new) for count, new in zip(self._counts, successes, strict=True)]
        self._wins = [keep * wins + sum(new) for wins, new in zip(self._wins, successes, strict=True)]

    def state(self) -> Mapping[str, JSON]:
        """Returns the counts of groups and successes by level."""
        return {"counts": list(self._counts), "wins": list(self._wins)}

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state`."""
        self._counts = list(cast(Sequence[float], state["counts"]))
        self._wins = list(cast(Sequence[float], state["wins"]))


CURRICULA: Mapping[str, Callable[..., Curriculum]] = {
    "steps": Thresholds,
    "learnability": Learnability,
}
"""The curricula by `CurriculumConfig.method`; each takes the number of levels, and settings as keywords."""


class CurriculumTasks:
    """A `TaskSource` over sources of one level each; held-out tasks are those of `held_out`, whatever is trained on.

    The level of a place is drawn by the curriculum's shares, from the seed, step and place alone.
    """

    def __init__(
        self,
        levels: Mapping[str, TaskSource],
        held_out: TaskSource,
        curriculum: Curriculum,
        run_seed: int,
    ) -> None:
        self.levels, self.held_out = dict(levels), held_out
        self.curriculum = curriculum
        self._run_seed = run_seed
        self._metrics: dict[str, float] = {}

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Returns a task for each place, of the level that the place draws."""
        sources, bounds = list(self.levels.values()), list(accumulate(self.curriculum.shares()))
        tasks = []
        for place in places:
            drawn = derive(self._run_seed, "curriculum", step, place) / 2**63 * bounds[-1]
            level = next((level for level, bound in enumerate(bounds) if drawn < bound), len(bounds) - 1)
            tasks += sources[level].train_tasks(step, range(place, place + 1))
        return tasks

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Returns the held-out tasks of `held_out`."""
        return self.held_out.eval_tasks(num_tasks)

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Moves the shares by the success of the groups; failed episodes do not count."""
        successes: list[list[float]] = []
        played = 0
        self._metrics = {}
        for number, (name, source) in enumerate(self.levels.items()):
            own = [group for group in groups if source.holds(group.task)]
            source.finish(step, own)
            successes.append([rate for group in own if (rate := success_rate(group)) is not None])
            played += number * len(own)
            if successes[-1]:
                self._metrics[f"level_success_{name}"] = sum(successes[-1]) / len(successes[-1])
        if groups:
            self._metrics["level"] = 1 + played / len(groups)
        self.curriculum.observe(successes)
        shares = zip(self.levels, self.curriculum.shares(), strict=True)
        self._metrics |= {f"level_share_{name}": round(share, 4) for name, share in shares}

    def holds(self, task: Task) -> bool:
        """Returns True if the task is of one of the levels, or held out."""
        return self.held_out.holds(task) or any(source.holds(task) for source in self.levels.values())

    def label(self, task: Task) -> str:
        """Returns "", as the source has one part."""
        return ""

    def metrics(self) -> Mapping[str, float]:
        """Returns `level`, `level_success_VALUE` and `level_share_VALUE`.

        `level` is the mean of the played levels (1 is the easiest), `level_share_VALUE` the share in the next step.
        """
        return self._metrics

    def state(self) -> Mapping[str, JSON]:
        """Returns the state of the curriculum and of each level."""
        return {
            "curriculum": self.curriculum.state(),
            "levels": {name: source.state() for name, source in self.levels.items()},
        }

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state`."""
        self.curriculum.load(cast(Mapping[str, JSON], state["curriculum"]))
        levels = cast(Mapping[str, Mapping[str, JSON]], state["levels"])
        for name, source in self.levels.items():
            source.load(levels[name])
