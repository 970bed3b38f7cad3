"""Checks that the numbers of `metrics.jsonl` follow from the episodes of their steps."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentgym.errors import NOT_JSON
from agentgym.evaluation.run_check.basis import Record
from agentgym.evaluation.run_check.record_checks import lacks_ids
from agentgym.rollout.record.episode_digests import is_trained
from agentgym.rollout.record.ledger import Ledger, Violation
from agentgym.rollout.scores.statistics import FAILED_CALLS
from agentgym.trajectory import Status, StopReason

__all__ = ["StepChecks"]

COUNTS = tuple("episodes truncated replies_cut replies_cut_by_window left_out tokens trained_tokens tool_calls".split())
OF_IDS = ("tokens", "trained_tokens", "longest_reply", "left_out", "dead_groups", "dead_group_share")
"""The numbers that follow from ids and advantages alone."""


@dataclass(slots=True)
class _Step:
    """The sums over the training episodes of one step."""

    counts: Counter[str] = field(default_factory=Counter)
    """The `COUNTS` and `FAILED_CALLS`, and of the episodes with a reward the `calls` and `turns`."""
    longest_reply: int = 0
    rewards: list[float] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    """The groups in which a token has an advantage other than 0."""
    failed: Counter[str] = field(default_factory=Counter)
    """The cut replies, calls and turns of episodes without a reward."""
    lacks_ids: bool = False
    """True if the record leaves out ids and advantages (record.tokens)."""

    def add(self, record: Record) -> None:
        self.lacks_ids |= lacks_ids(record)
        spans = [span for row in record["rows"] for span in row["spans"]]
        replies = [span for span in spans if span["source"] == "policy"]
        turns, counts = record["turns"], self.counts
        counts["episodes"] += 1
        counts["tokens"] += sum([len(span["ids"]) for span in spans])
        counted = counts if Status(record["status"]).trainable else self.failed
        counted["turns"] += len(turns)
        counted["calls"] += record["metrics"].get("num_tool_calls", 0)
        counted["replies_cut"] += sum(_is_cut(turn) and not turn.get("asked") for turn in turns)
        ends_at_window = record["stop_reason"] == StopReason.CONTEXT and bool(turns) and _is_cut(turns[-1])
        counted["replies_cut_by_window"] += ends_at_window
        counts["tool_calls"] += record["metrics"].get("num_tool_calls", 0)
        for name in FAILED_CALLS:
            counts[name] += record["metrics"].get(name, 0)
        self.longest_reply = max([self.longest_reply, *[len(span["ids"]) for span in replies]])
        self.groups.add(record["group"])
        if counted is self.failed:
            return
        counts["left_out"] += record["advantages"] is None
        if any(map(any, record["advantages"] or ())):
            self.live.add(record["group"])
        self.rewards.append(record["reward"])
        self.successes.append(bool(record["success"]))
        counts["truncated"] += record["status"] == Status.TRUNCATED
        counts["trained_tokens"] += sum([len(span["ids"]) for span in replies if is_trained(span)])

    def numbers(self) -> Mapping[str, float]:
        """Returns the metrics by their names in `metrics.jsonl`; means over no episodes are 0."""
        counts, count = self.counts, max(1, len(self.rewards))
        num_dead = len(self.groups - self.live)
        numbers = {
            **{name: counts[name] for name in (*COUNTS, *FAILED_CALLS)},
            "failed": counts["episodes"] - len(self.rewards),
            "longest_reply": self.longest_reply,
            "success": sum(self.successes) / count,
            "reward_mean": math.fsum(self.rewards) / count,
            "turns_mean": counts["turns"] / count,
            "groups": len(self.groups),
            "dead_groups": num_dead,
            "dead_group_share": num_dead / max(1, len(self.groups)),
            **_of_replies(counts),
        }
        return {name: value for name, value in numbers.items() if not (self.lacks_ids and name in OF_IDS)}

    def older_numbers(self) -> Mapping[str, float]:
        """Returns the numbers that earlier versions took over all episodes, those without a reward too."""
        return _of_replies(self.counts + self.failed)


def _of_replies(counts: Counter[str]) -> dict[str, float]:
    per_turn = {"tool_calls_per_turn": counts["calls"] / counts["turns"]} if counts["turns"] else {}
    return {name: counts[name] for name in ("replies_cut", "replies_cut_by_window")} | per_turn


def _is_close(stated: float, value: float) -> bool:
    return math.isclose(stated, value, rel_tol=1e-6, abs_tol=1e-6)


def _is_cut(turn: Mapping[str, Any]) -> bool:
    """Returns True if a limit of tokens ended the reply of a stored turn."""
    return bool(turn["finish_reason"] == "length")


class StepChecks:
    """Collects training episodes by step, then compares each line of `metrics.jsonl` with them."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._evaluations: dict[int, _Step] = {}
        """The evaluations that were played before a step, by the step."""
        self._line_steps: set[int] = set()

    def add(self, record: Record) -> None:
        """Adds one line of `episodes.jsonl`."""
        if record["phase"] == "train":
            self._steps.setdefault(record["step"], _Step()).add(record)
        elif record["phase"] in ("eval_before", "eval_during"):
            self._evaluations.setdefault(record["step"] + 1, _Step()).add(record)

    def check(self, ledger: Ledger, line: int, raw: bytes) -> None:
        """Checks the property `metrics` on a line of `metrics.jsonl`."""
        problem = self._problem(raw)
        ledger.check("metrics", Violation(line, problem=f"of metrics.jsonl: {problem}") if problem else None)

    def close(self, ledger: Ledger) -> None:
        """Checks that each step with episodes had its line; the newest step may be unfinished."""
        for step in sorted(self._steps)[:-1]:
            if step not in self._line_steps:
                ledger.check("metrics", Violation(None, problem=f"metrics.jsonl has no line for step {step}"))

    def _problem(self, raw: bytes) -> str:
        try:
            line = json.loads(raw)
        except NOT_JSON as error:
            return f"not JSON: {error}"
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            return "an object with a step was wanted"
        self._line_steps.add(line["step"])
        step = self._steps.get(line["step"], _Step())
        expected, older = step.numbers(), step.older_numbers()
        if "episodes" not in line and not step.counts:  # of a lesson, which learns from rows
            expected = {}
        if "eval_success" in line:
            held_out = self._evaluations.get(line["step"], _Step()).numbers()
            expected = {**expected, **{f"eval_{name}": held_out[name] for name in ("success", "reward_mean")}}
        for name, value in expected.items():
            stated = line.get(name, value)
            possible = (value, older.get(name, value))
            if not isinstance(stated, int | float) or not any(_is_close(stated, number) for number in possible):
                return f"{name} of step {line['step']} is {stated}, its episodes give {value:g}"
        return ""
