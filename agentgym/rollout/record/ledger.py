"""The checks of a run, counted by property, with the first place where each property does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from agentgym.types import JSON

__all__ = ["Ledger", "Property", "PropertyTally", "Violation", "first_difference"]


@dataclass(frozen=True, slots=True)
class Property:
    """A property of every valid record; `unit` is what is counted."""

    name: str
    meaning: str
    unit: str
    needs_renderer: bool = False


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of a property: the problem, and where in a record it is.

    `line` counts from 1, as editors do; `row`, `turn` and `token` (of its row) are indices from 0. Each is None if it
    does not apply.
    """

    line: int | None
    row: int | None = None
    turn: int | None = None
    token: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        names = ("line", "row", "turn", "token")
        parts = [f"{name} {value}" for name in names if (value := getattr(self, name)) is not None]
        return f"{', '.join(parts)}: {self.problem}" if parts else self.problem

    def to_json(self) -> dict[str, JSON]:
        """Returns the violation as a JSON object."""
        return asdict(self)


@dataclass(slots=True)
class PropertyTally:
    """The counts for one property."""

    num_checked: int = 0
    num_failed: int = 0
    first: Violation | None = None
    skipped: dict[str, int] = field(default_factory=dict)
    """The number of units that were not checked, by reason."""


class Ledger:
    """Tallies by property name."""

    def __init__(self) -> None:
        self._tallies: dict[str, PropertyTally] = {}

    def tally(self, name: str) -> PropertyTally:
        """Returns the tally of a property, empty at first."""
        tally = self._tallies.get(name)
        if tally is None:
            tally = self._tallies[name] = PropertyTally()
        return tally

    def check(self, name: str, problem: Violation | None) -> None:
        """Counts one check, failed if there is a problem."""
        self.tally(name).num_checked += 1
        if problem is not None:
            self.fail(name, problem)

    def fail(self, name: str, problem: Violation) -> None:
        """Counts a failure of something that is counted already."""
        tally = self.tally(name)
        tally.num_failed += 1
        tally.first = tally.first or problem

    def skip(self, name: str, reason: str) -> None:
        """Counts something that could not be checked."""
        skipped = self.tally(name).skipped
        skipped[reason] = skipped.get(reason, 0) + 1


def first_difference(ids: Sequence[object], others: Sequence[object]) -> int:
    """Returns the first index at which two sequences differ; the shorter one's length if it begins the other."""
    pairs = zip(ids, others, strict=False)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(ids), len(others)))
