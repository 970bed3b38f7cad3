"""Whether the numbers of `metrics.jsonl` follow from the episodes of their steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentgym.evaluation.record_checks import Record
from agentgym.rollout.ledger import Ledger, Place
from agentgym.rollout.seal import is_trained
from agentgym.trajectory import Status

__all__ = ["StepChecks"]


@dataclass(slots=True)
class _Step:
    """What the training episodes of one step add up to."""

    num_episodes: int = 0
    num_truncated: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    """Groups in which a token has an advantage other than 0."""

    def add(self, record: Record) -> None:
        spans = [span for row in record["rows"] for span in row["spans"]]
        self.num_episodes += 1
        self.num_tokens += sum(len(span["ids"]) for span in spans)
        self.groups.add(record["group"])
        if not Status(record["status"]).trainable:
            return
        if any(value for row in record["advantages"] or () for value in row):
            self.live.add(record["group"])
        self.rewards.append(record["reward"])
        self.successes.append(bool(record["success"]))
        self.num_truncated += record["status"] == Status.TRUNCATED
        self.num_trained_tokens += sum(len(span["ids"]) for span in spans if is_trained(span))

    def numbers(self) -> Mapping[str, float]:
        """The metrics that follow, by their names in `metrics.jsonl`; means are 0 over nothing."""
        count = max(1, len(self.rewards))
        return {
            "episodes": self.num_episodes,
            "failed": self.num_episodes - len(self.rewards),
            "truncated": self.num_truncated,
            "tokens": self.num_tokens,
            "trained_tokens": self.num_trained_tokens,
            "success": sum(self.successes) / count,
            "reward_mean": math.fsum(self.rewards) / count,
            "groups": len(self.groups),
            "dead_groups": len(self.groups - self.live),
        }


class StepChecks:
    """Collects training episodes by step, then compares each line of `metrics.jsonl` with them."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._seen: set[int] = set()

    def add(self, record: Record) -> None:
        """Takes one line of `episodes.jsonl`."""
        if record["phase"] == "train":
            self._steps.setdefault(record["step"], _Step()).add(record)

    def check(self, ledger: Ledger, line: int, raw: bytes) -> None:
        """Checks the property `metrics` on a line of `metrics.jsonl`."""
        said = self._problem(raw)
        ledger.check("metrics", Place(line, problem=f"of metrics.jsonl: {said}") if said else None)

    def close(self, ledger: Ledger) -> None:
        """Checks that each step with episodes had its line; the newest may still be under way."""
        for step in sorted(self._steps)[:-1]:
            if step not in self._seen:
                ledger.check("metrics", Place(None, problem=f"metrics.jsonl has no line for step {step}"))

    def _problem(self, raw: bytes) -> str:
        try:
            given = json.loads(raw)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return f"not JSON: {error}"
        if not isinstance(given, dict) or not isinstance(given.get("step"), int):
            return "an object with a step was wanted"
        self._seen.add(given["step"])
        wanted = self._steps.get(given["step"], _Step()).numbers()
        for name, value in wanted.items():
            stated = given.get(name, value)
            if not isinstance(stated, int | float) or not math.isclose(stated, value, rel_tol=1e-6, abs_tol=1e-6):
                return f"{name} of step {given['step']} is {stated}, its episodes give {value:g}"
        return ""
