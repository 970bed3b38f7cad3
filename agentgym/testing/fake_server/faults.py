"""Faults of a fake server on demand: by seeded rates, or at exact requests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast, get_args

from agentgym.errors import ConfigError, UnknownName, nearest
from agentgym.settings.functions import check_above_zero
from agentgym.types import JSON

__all__ = ["FaultKind", "FaultPlan", "Faults"]

FaultKind: TypeAlias = Literal["error", "busy", "drop", "lengths", "vocabulary", "hang", "abort", "die"]
"""`error`: status 500 · `busy`: 429 with Retry-After · `drop`: the connection closes in the middle of the answer ·
`lengths`: one logprob too few · `vocabulary`: an id outside the vocabulary · `hang`: no answer until it is aborted ·
`abort`: the reply ends half way as aborted · `die`: the server ends as if killed, in place of the answer."""
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The requests that fail, and how: `Faults(rates={"error": 0.01}, schedule={7: "die"})`."""

    rates: Mapping[FaultKind, float] = field(default_factory=dict)
    """The share of requests by kind, drawn by `seed`; together at most 1."""
    schedule: Mapping[int, FaultKind] = field(default_factory=dict)
    """The fault by the number of a request, from 0 in order of arrival; it precedes the rates."""
    retry_after_s: float = 0.1
    """The seconds of Retry-After in a `busy` answer."""
    slow_factor: float = 1.0
    """The factor of all times of sampling; 5 is a replica five times slower than it should be."""
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in (*self.rates, *self.schedule.values()):
            if kind not in KINDS:
                raise UnknownName(f"unknown fault {kind!r}{nearest(kind, KINDS) or '.'} Known: {', '.join(KINDS)}")
        total = sum(self.rates.values())
        if total > 1.0 or any(not 0.0 <= rate <= 1.0 for rate in self.rates.values()):
            raise ConfigError(f"fault rates are in [0, 1] and at most 1 together, got {dict(self.rates)}")
        check_above_zero(self, "slow_factor")

    @staticmethod
    def from_json(value: Mapping[str, JSON]) -> Faults:
        """Reads the result of `to_json`; raises ConfigError or UnknownName for anything else."""
        names = ("rates", "schedule", "retry_after_s", "slow_factor", "seed")
        for name in value:
            if name not in names:
                raise UnknownName(f"unknown field {name!r} of faults{nearest(name, names) or '.'}")
        try:
            rates = {cast(FaultKind, kind): float(rate) for kind, rate in _object(value.get("rates")).items()}
            schedule = {int(key): cast(FaultKind, kind) for key, kind in _object(value.get("schedule")).items()}
            numbers = {name: float(cast(float, value[name])) for name in names[2:4] if name in value}
            return Faults(rates=rates, schedule=schedule, seed=int(cast(int, value.get("seed", 0))), **numbers)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"faults cannot be read: {error}") from error

    def to_json(self) -> dict[str, JSON]:
        """Returns the JSON that `POST /fake/faults` takes."""
        schedule: dict[str, JSON] = {str(number): kind for number, kind in self.schedule.items()}
        rates: dict[str, JSON] = {str(kind): rate for kind, rate in self.rates.items()}
        numbers: dict[str, JSON] = {"retry_after_s": self.retry_after_s, "slow_factor": self.slow_factor}
        return {"rates": rates, "schedule": schedule, **numbers, "seed": self.seed}


def _object(value: JSON) -> Mapping[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"an object was wanted, got {value!r}")
    return cast(Mapping[str, float], value)


class FaultPlan:
    """Draws the fault of each request in turn; the same `Faults` give the same sequence."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._random = random.Random(faults.seed)
        self._number = 0

    def next(self) -> FaultKind | None:
        """Returns the fault of the request that has just arrived, or None."""
        number = self._number
        self._number += 1
        if not self.faults.rates and not self.faults.schedule:
            return None
        draw = self._random.random()
        if number in self.faults.schedule:
            return self.faults.schedule[number]
        for kind, rate in self.faults.rates.items():
            draw -= rate
            if draw < 0.0:
                return kind
        return None
