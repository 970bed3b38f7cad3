"""Several sources at once, by weight."""

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
    """One environment of a mix: `{"weight": 2, "kwargs": {"level": 1}}` under the name of the environment."""

    env: str
    weight: float
    kwargs: Mapping[str, JSON] = field(default_factory=dict)
    levels: tuple[int | float | str, ...] | None = None
    """Values of the curriculum's keyword, in place of the common ones; () trains it without a curriculum."""


def read_mix(mix: Mapping[str, object]) -> dict[str, MixEntry]:
    """The entries of a mix by name; raises ConfigError for a weight that is none and for settings that do not exist."""
    entries = {}
    known = ("weight", "env", "kwargs", "levels")
    for name, given in mix.items():
        settings: Mapping[str, object] = given if isinstance(given, Mapping) else {"weight": given}
        for key in settings:
            if key not in known:
                near = nearest(key, known) or "."
                raise ConfigError(f"mix: {name!r} has the unknown setting {key!r}{near} Known: {', '.join(known)}")
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
        f"{one!r} and {other!r}"
        for position, (other, second) in enumerate(entries.items())
        for one, first in list(entries.items())[:position]
        if (first.env, dict(first.kwargs)) == (second.env, dict(second.kwargs))
    ]
    if twice:
        raise ConfigError(f"mix: {twice[0]} are the same environment with the same keywords; give one of them")
    return entries


def apportion(weights: Sequence[float], num_places: int, given: Sequence[int] | None = None) -> list[int]:
    """How many of `num_places` each weight gets, its quota rounded down or up: the largest remainders are rounded up.

    `given` are the places that each had before: what a weight got too few of then counts as a remainder now, so that
    no weight is ever a whole place behind.

    >>> apportion([2, 1], 4)
    [3, 1]
    >>> apportion([2, 1], 4, given=[3, 1])
    [2, 2]
    """
    total = sum(weights)
    before = list(given) if given is not None else [0] * len(weights)
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

    Every portion of `tasks_per_step` places has the exact proportions, to a whole place; what is rounded in one step is
    made up for in the next. Places beyond a step's own, which replace groups, are shared out in the same way. So the
    proportions are those of what is played: a filter may leave more out of one source than of another.
    Held-out tasks are shared out by the same weights.
    """

    def __init__(self, sources: Mapping[str, TaskSource], weights: Sequence[float], tasks_per_step: int) -> None:
        self.sources = dict(sources)
        self.weights = tuple(weights)
        self.tasks_per_step = tasks_per_step
        self._shares: list[list[int]] = []
        """By step, from 1."""
        self._given = [0] * len(self.weights)
        """The sums of these."""
        self._metrics: dict[str, float] = {}

    def train_tasks(self, step: int, places: range) -> list[Task]:
        """Those of the sources, at places of their own, taken in turns."""
        order = self._turns(self._share(step))
        num_rounds, names = max(places, default=0) // len(order) + 1, list(self.sources)
        turns = (order * num_rounds)[: max(places, default=-1) + 1]
        own = [turns[:place].count(turn) for place, turn in enumerate(turns)]
        return [
            self.sources[names[turns[place]]].train_tasks(step, range(own[place], own[place] + 1))[0]
            for place in places
        ]

    def eval_tasks(self, num_tasks: int) -> list[Task]:
        """Those of each source, one source after the other."""
        shares = apportion(self.weights, num_tasks)
        pairs = zip(self.sources.values(), shares, strict=True)
        return [task for source, share in pairs for task in source.eval_tasks(share)]

    def finish(self, step: int, groups: Sequence[Group]) -> None:
        """Tells each source of its own groups, and sums them up."""
        self._metrics = {}
        for name, source in self.sources.items():
            own = [group for group in groups if self.label(group.task) == name]
            source.finish(step, own)
            kept = [one for group in own for one in group.trajectories if one.status.trainable]
            self._metrics[f"episodes/{name}"] = sum(len(group.trajectories) for group in own)
            if kept:  # a rate of nothing is left out
                self._metrics[f"success/{name}"] = sum(bool(one.success) for one in kept) / len(kept)
                self._metrics[f"reward_mean/{name}"] = sum(one.reward or 0.0 for one in kept) / len(kept)
            self._metrics |= {f"{key}/{name}": value for key, value in source.metrics().items()}

    def holds(self, task: Task) -> bool:
        """Whether one of the sources holds it."""
        return any(source.holds(task) for source in self.sources.values())

    def label(self, task: Task) -> str:
        """The name of the source that holds it."""
        return next((name for name, source in self.sources.items() if source.holds(task)), "")

    def metrics(self) -> Mapping[str, float]:
        """`success/NAME`, `reward_mean/NAME` and `episodes/NAME` of each source, and what it says itself."""
        return self._metrics

    def state(self) -> Mapping[str, JSON]:
        """That of each source, by name."""
        return {name: source.state() for name, source in self.sources.items()}

    def load(self, state: Mapping[str, JSON]) -> None:
        """Goes on from a `state`."""
        for name, source in self.sources.items():
            source.load(cast(Mapping[str, JSON], state[name]))

    def _share(self, step: int) -> list[int]:
        """The places of each source in a step."""
        while len(self._shares) < step:
            shares = apportion(self.weights, self.tasks_per_step, self._given)
            self._given = [before + share for before, share in zip(self._given, shares, strict=True)]
            self._shares.append(shares)
        return self._shares[step - 1]

    def _turns(self, shares: Sequence[int]) -> list[int]:
        """The sources of a step's places: each spread evenly over them."""
        spread = [((number + 0.5) / share, index) for index, share in enumerate(shares) for number in range(share)]
        return [index for _, index in sorted(spread)]
