"""The findings of verifying a model, by property, and their report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from agentgym.rollout.record.ledger import Property
from agentgym.types import JSON

__all__ = [
    "PROPERTIES",
    "ModelCheckOutcome",
    "ModelFinding",
    "ModelFindings",
    "ModelReport",
    "ModelVerdict",
    "verdicts_of",
]


PROPERTIES = (
    Property("renderer", "the template can be driven turn by turn", "renderers"),
    Property("ids", "transformers gives a text the ids that we give it", "texts"),
    Property("render", "render gives the ids of apply_chat_template", "conversations"),
    Property("shown", "a prompt holds every message, tool and call", "parts"),
    Property("extend", "extend appends what the template writes after a reply", "replies"),
    Property("prefix", "the template leaves what came before a reply as it was", "replies"),
    Property("cut", "a cut reply gets its end, and goes on like a whole one", "replies"),
    Property("stop", "a reply holds one stop id, its last", "replies"),
    Property("parse", "a reply is read as what it says", "replies"),
    Property("several_calls", "several calls in one reply are all read, in their order", "replies"),
    Property("reasoning", "reasoning is kept apart from content", "replies"),
    Property("malformed", "of a cut or broken call nothing is lost, and no call is made up", "broken replies"),
    Property("marks", "text that spells a mark never becomes one", "places"),
    Property("spelled", "sampled ids that only spell a mark are text", "marks"),
    Property("round_trip", "a text comes back from its ids", "texts"),
    Property("resampled", "ids that decoding and encoding would change are kept", "replies"),
    Property("repeatable", "a conversation gives the same ids at any time", "conversations"),
)


class ModelCheckOutcome(StrEnum):
    """The outcome of a property's check."""

    OK = "ok"
    NOTED = "noted"
    """The template does not keep the property, but training is exact nevertheless."""
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class ModelFinding:
    """A place where a property does not hold: `ModelFinding("a talk", "extend gives ..., the template ...")`."""

    where: str
    """The conversation, or the text."""
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(slots=True)
class ModelCheckTally:
    """The counts of one property."""

    num_checked: int = 0
    failed: list[ModelFinding] = field(default_factory=list)
    noted: list[ModelFinding] = field(default_factory=list)
    skipped: str | None = None


class ModelFindings:
    """Tallies by property name; every name is one of `PROPERTIES`."""

    def __init__(self) -> None:
        self.tallies: Mapping[str, ModelCheckTally] = {entry.name: ModelCheckTally() for entry in PROPERTIES}

    def add_pass(self, name: str) -> None:
        """Counts a unit for which the property holds."""
        self.tallies[name].num_checked += 1

    def add_failure(self, name: str, where: str, problem: str) -> None:
        """Counts a unit that training would get wrong."""
        self.tallies[name].num_checked += 1
        self.tallies[name].failed.append(ModelFinding(where, problem))

    def add_note(self, name: str, where: str, problem: str) -> None:
        """Counts a unit for which the property does not hold, with no error in training."""
        self.tallies[name].num_checked += 1
        self.tallies[name].noted.append(ModelFinding(where, problem))

    def skip(self, name: str, reason: str) -> None:
        """Records why nothing is checked."""
        self.tallies[name].skipped = reason

    def check(self, name: str, where: str, problem: str) -> None:
        """Counts a unit, which fails if there is a problem."""
        self.add_failure(name, where, problem) if problem else self.add_pass(name)


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """The result for one property; `first` is the first place that decided it."""

    about: Property
    outcome: ModelCheckOutcome
    num_checked: int
    num_failed: int
    num_noted: int
    first: ModelFinding | None
    skipped: str | None

    def cell(self) -> str:
        """Returns the verdict in words."""
        if self.skipped is not None:
            return f"not checked: {self.skipped}"
        if self.first is None:
            return self.about.meaning
        count = self.num_failed if self.outcome is ModelCheckOutcome.FAILED else self.num_noted
        return f"{count} of {self.num_checked} {self.about.unit}; first, {self.first}"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The verdicts on a model folder, one per entry of `PROPERTIES`, in its order."""

    name: str
    family: str
    renderer: str
    """The name of the renderer's class."""
    num_conversations: int
    verdicts: tuple[ModelVerdict, ...]

    @property
    def ok(self) -> bool:
        """True if no property failed."""
        return all(verdict.outcome is not ModelCheckOutcome.FAILED for verdict in self.verdicts)

    def rows(self) -> list[list[str]]:
        """Returns the report as cells: property, outcome, number of checks, verdict in words."""
        return [[v.about.name, SHOWN[v.outcome], str(v.num_checked), v.cell()] for v in self.verdicts]

    def summary(self) -> str:
        """Returns the report in one line."""
        failed = [verdict.about.name for verdict in self.verdicts if verdict.outcome is ModelCheckOutcome.FAILED]
        outcome = f"not sound: {', '.join(failed)}" if failed else "sound"
        return f"{self.name}: family {self.family}, {self.renderer}, {self.num_conversations} conversations: {outcome}"

    def to_json(self) -> dict[str, JSON]:
        """Returns the report as a JSON object: `ok`, what was verified, and `properties` by name."""
        return {
            "ok": self.ok,
            "model": self.name,
            "family": self.family,
            "renderer": self.renderer,
            "num_conversations": self.num_conversations,
            "properties": {
                verdict.about.name: {
                    "verdict": verdict.outcome.value,
                    "num_checked": verdict.num_checked,
                    "num_failed": verdict.num_failed,
                    "num_noted": verdict.num_noted,
                    "first": None if verdict.first is None else asdict(verdict.first),
                    "skipped": verdict.skipped,
                }
                for verdict in self.verdicts
            },
        }


SHOWN = {
    ModelCheckOutcome.OK: "ok",
    ModelCheckOutcome.NOTED: "noted",
    ModelCheckOutcome.FAILED: "FAILED",
    ModelCheckOutcome.SKIPPED: "-",
}


def verdicts_of(findings: ModelFindings) -> tuple[ModelVerdict, ...]:
    """Returns the verdict of each property."""
    return tuple(_verdict(entry, findings.tallies[entry.name]) for entry in PROPERTIES)


def _verdict(about: Property, tally: ModelCheckTally) -> ModelVerdict:
    skipped = None if tally.num_checked else tally.skipped or f"there are no {about.unit} to check"
    decisive = tally.failed or tally.noted
    if skipped is not None:
        outcome = ModelCheckOutcome.SKIPPED
    elif tally.failed:
        outcome = ModelCheckOutcome.FAILED
    else:
        outcome = ModelCheckOutcome.NOTED if tally.noted else ModelCheckOutcome.OK
    first = decisive[0] if decisive else None
    return ModelVerdict(about, outcome, tally.num_checked, len(tally.failed), len(tally.noted), first, skipped)
