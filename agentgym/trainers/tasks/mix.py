"""A mix of several sources by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from agentgym.errors import ConfigError, nearest
from agentgym.trainers.tasks.source import TaskSource
from agentgym.trajectory import Group
from agentgym.types import JSON, Task

__all__ = ["MixEntry", "MixedTasks", "apportion", "read_mix"]


@dataclass(frozen=True, kw_only=True)
class MixEntry:
    """An environment of a mix: `{"weight": 2, "kwargs": {"level": 1}}` under the name of the environment."""

    env: str
    weight: float
    kwargs: Mapping[str, JSON] = field(default_factory=dict)
    levels: tuple[int | float | str, ...] | None = None
    """The values of the curriculum's keyword, in place of the common ones; () trains without a curriculum."""


def read_mix(mix: Mapping[str, object]) -> dict[str, MixEntry]:
    """Returns the entries of a mix by name; raises ConfigError for invalid weights and unknown settings."""
    entries = {}
    keys = ("weight", "env", "kwargs", "levels")
    for name, entry in mix.items():
        settings: Mapping[str, object] = entry if isinstance(entry, Mapping) else {"weight": entry}
        for key in settings:
            if key not in keys:
                near = nearest(key, keys) or "."
                raise ConfigError(f"mix: {name!r} has the unknown setting {key!r}{near} Known: {', '.join(keys)}")
        weight = settings.get("weight", 1)
        kwargs, levels = settings.get("kwargs") or {}, settings.get("levels")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ConfigError(f"mix: the weight of {name!r} is a number above 0, such as {name}=2; got {weight!r}")
        if not isinstance(kwargs, Mapping) or not isinstance(levels, list | tuple | None):
            raise ConfigError(f"mix: kwargs of {name!r} are names with values, and levels a list; got {dict(settings)}")
        entries[name] = MixEntry(
            env=str(settings.get("env", name)),
            weight=float(weight),
            kwargs=cast(Mapping[str, JSON], kwargs),
            levels=None if levels is None else tuple(levels),
        )
    twice = [
        f"{earlier!r} and {other!r}"
        for position, (other, second) in enumerate(entries.items())
        for earlier, first in list(entries.items())[:position]
        if (first.env, dict(first.kwargs)) == (second.env, dict(second.kwargs))
    ]
    if twice:
        raise ConfigError(f"mix: {twice[0]} are the same environment with the same keywords; give one of them")
    return entries


def apportion(weights: Sequence[float], num_places: int, past: Sequence[int] | None = None) -> list[int]:
    """Divides `num_places` by weight, each quota rounded down or up: the largest remainders are rounded up.

    `past` are the places that each weight had before: a deficit from then counts as a remainder now, so that no weight
    ever lacks a whole place.

    >>> apportion([2, 1], 4)
    [3, 1]
    >>> apportion([2, 1], 4, past=[3, 1])
    [2, 2]
    """
    total = sum(weights)
    before = list(past) if past is not None else [0] * len(weights)
    shares = [int(num_places * weight / total + 1e-9) for weight in weights]
    owed = [
        (sum(before) + num_places) * weight / total - had - share
        for weight, had, share in zip(weights, before, shares, strict=True)
    ]
    order = sorted(range(len(weights)), key=lambda index: (-round(owed[index], 9), index))
    for index in order[: num_places - sum(shares)]:
        shares[index] += 1
    return shares


class MixedTasks:
    """Tasks of several sources in the proportions of their weights.

    Every portion of `tasks_per_step` places has the exact proportions, to a whole place; the rounding of one step is
    made up for in the next. Places beyond a step's own, which replace groups, are divided in the same way. So the
    proportions are those of the played tasks: a filter may leave more out of one source than of another.
    Held-out tasks are divided by the same weights.
    """

    def __init__(self, sources: Mapping[str, TaskSource], weights: Sequence[float], tasks_per_step: int) -> None:
        self.sources = dict(sources)
        self.weights = tuple(weights)
        self.tasks_per_step = tasks_per_step
        self._shares: list[list[int]] = []
        """The places of each source, by step from 1."""
        self._totals = [0] * len(self.weights)
        """The places of each source, summed over the steps."""
        self._metrics: dict[str, float] = {}

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Returns tasks of the sources in turns; each source has places of its own."""
        order = self._turns(self._share(step))
        num_rounds, names = max(places, default=0) // len(order) + 1, list(self.sources)
        turns = (order * num_rounds)[: max(places, default=-1) + 1]
        own = [turns[:place].count(turn) for place, turn in enumerate(turns)]
        return [
            self.sources[names[turns[place]]].train_tasks(step, range(own[place], own[place] + 1))[0]
            for place in places
        ]

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Returns the held-out tasks of each source, one source after the other."""
        shares = apportion(self.weights, num_tasks)
        pairs = zip(self.sources.values(), shares, strict=True)
        return [task for source, share in pairs for task in source.eval_tasks(share)]

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Passes each source its own groups, and computes their metrics."""
        self._metrics = {}
        for name, source in self.sources.items():
            own = [group for group in groups if self.label(group.task) == name]
            source.finish(step, own)
            episodes = [trajectory for group in own for trajectory in group.trajectories if trajectory.status.trainable]
            self._metrics[f"episodes/{name}"] = sum(len(group.trajectories) for group in own)
            if num := len(episodes):  # without episodes there is no rate
                self._metrics[f"success/{name}"] = sum(bool(trajectory.success) for trajectory in episodes) / num
                self._metrics[f"reward_mean/{name}"] = sum(trajectory.reward or 0.0 for trajectory in episodes) / num
            self._metrics |= {f"{key}/{name}": value for key, value in source.metrics().items()}

    def holds(self, task: Task) -> bool:
        """Returns True if one of the sources holds the task."""
        return any(source.holds(task) for source in self.sources.values())

    def label(self, task: Task) -> str:
        """Returns the name of the source that holds the task."""
        return next((name for name, source in self.sources.items() if source.holds(task)), "")

    def metrics(self) -> Mapping[str, float]:
        """Returns `success/NAME`, `reward_mean/NAME` and `episodes/NAME` of each source, and its own metrics."""
        return self._metrics

    def state(self) -> Mapping[str, JSON]:
        """Returns the state of each source, by name."""
        return {name: source.state() for name, source in self.sources.items()}

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state`."""
        for name, source in self.sources.items():
            source.load(cast(Mapping[str, JSON], state[name]))

    def _share(self, step: int) -> list[int]:
        """Returns the number of places of each source in a step."""
        while len(self._shares) < step:
            shares = apportion(self.weights, self.tasks_per_step, self._totals)
            self._totals = [before + share for before, share in zip(self._totals, shares, strict=True)]
            self._shares.append(shares)
        return self._shares[step - 1]

    def _turns(self, shares: Sequence[int]) -> list[int]:
        """Returns the source of each of a step's places; each source is spread evenly over them."""
        spread = [((number + 0.5) / share, index) for index, share in enumerate(shares) for number in range(share)]
        return [index for _, index in sorted(spread)]
