"""The results of the checks of a model, and what those of its chat template count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from agentgym.rollout.record.ledger import Property
from agentgym.types import JSON

__all__ = ["PROPERTIES", "CheckOutcome", "CheckResult", "ModelFinding", "Tally", "TemplateFindings", "TemplateReport"]


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
"""The properties of a tokenizer with its chat template."""


class CheckOutcome(StrEnum):
    """The outcome of a check."""

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


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check of a model."""

    name: str
    outcome: CheckOutcome
    found: str
    """The largest difference, what holds, the first place that decided it, or the reason why nothing was checked."""
    num_checked: int = 1
    num_failed: int = 0
    num_noted: int = 0
    first: ModelFinding | None = None
    """The first place that decided it, of a property of a chat template."""

    @classmethod
    def judge(cls, name: str, passed: bool, measurement: str) -> CheckResult:
        """Returns the result of a check that passed or failed as a whole."""
        return cls(name, CheckOutcome.OK if passed else CheckOutcome.FAILED, measurement, num_failed=int(not passed))

    @property
    def ok(self) -> bool:
        """True unless the check failed."""
        return self.outcome is not CheckOutcome.FAILED

    def row(self) -> list[str]:
        """Returns the result as cells: name, outcome, what was found."""
        return [self.name, OUTCOME_TEXTS[self.outcome], self.found]

    def to_json(self) -> dict[str, JSON]:
        """Returns the result as a JSON object."""
        return {
            "passed": self.ok,
            "verdict": self.outcome.value,
            "found": self.found,
            "num_checked": self.num_checked,
            "num_failed": self.num_failed,
            "num_noted": self.num_noted,
            "first": None if self.first is None else asdict(self.first),
        }


OUTCOME_TEXTS = {
    CheckOutcome.OK: "ok",
    CheckOutcome.NOTED: "noted",
    CheckOutcome.FAILED: "FAILED",
    CheckOutcome.SKIPPED: "-",
}


@dataclass(slots=True)
class Tally:
    """The counts of one property."""

    num_checked: int = 0
    failed: list[ModelFinding] = field(default_factory=list)
    noted: list[ModelFinding] = field(default_factory=list)
    skipped: str | None = None

    def result(self, about: Property) -> CheckResult:
        """Returns what was found of the property."""
        if not self.num_checked:
            reason = self.skipped or f"there are no {about.unit} to check"
            return CheckResult(about.name, CheckOutcome.SKIPPED, f"not checked: {reason}", 0)
        counts = (self.num_checked, len(self.failed), len(self.noted))
        findings = self.failed or self.noted
        if not findings:
            summary = f"{self.num_checked} {about.unit}: {about.meaning}"
            return CheckResult(about.name, CheckOutcome.OK, summary, *counts)
        outcome = CheckOutcome.FAILED if self.failed else CheckOutcome.NOTED
        summary = f"{len(findings)} of {self.num_checked} {about.unit}; first, {findings[0]}"
        return CheckResult(about.name, outcome, summary, *counts, findings[0])


class TemplateFindings:
    """Tallies by property name; every name is one of `PROPERTIES`."""

    def __init__(self) -> None:
        self.tallies: Mapping[str, Tally] = {entry.name: Tally() for entry in PROPERTIES}

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

    def results(self) -> tuple[CheckResult, ...]:
        """Returns the result of each property."""
        return tuple(self.tallies[entry.name].result(entry) for entry in PROPERTIES)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The results of a chat template, one per entry of `PROPERTIES`, in its order."""

    name: str
    family: str
    renderer: str
    """The name of the renderer's class."""
    num_conversations: int
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """True if no property failed."""
        return all(result.ok for result in self.results)

    def summary(self) -> str:
        """Returns the report in one line."""
        failed = [result.name for result in self.results if not result.ok]
        outcome = f"not sound: {', '.join(failed)}" if failed else "sound"
        return f"{self.name}: family {self.family}, {self.renderer}, {self.num_conversations} conversations: {outcome}"

    def to_json(self) -> dict[str, JSON]:
        """Returns the report as a JSON object: `ok`, what was checked, and `properties` by name."""
        return {
            "ok": self.ok,
            "model": self.name,
            "family": self.family,
            "renderer": self.renderer,
            "num_conversations": self.num_conversations,
            "properties": {result.name: result.to_json() for result in self.results},
        }
