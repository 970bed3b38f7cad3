"""The check that each sampled id is trained once, or excluded for a reason that fits its branch."""

from __future__ import annotations

from agentgym.evaluation.run_check.basis import Basis, Record
from agentgym.rollout.record.ledger import Ledger, Violation, first_difference
from agentgym.trajectory import BRANCH_LABELS

__all__ = ["check_once"]


def check_once(ledger: Ledger, line: int, record: Record, basis: Basis) -> None:
    """Checks that replies are numbered without gaps, exclusions have reasons, and forks have what they share."""
    problem = None
    orders = [index if turn.get("order") is None else turn["order"] for index, turn in enumerate(record["turns"])]
    if sorted(orders) != list(range(len(orders))):
        text = f"the replies are numbered {sorted(orders)[:20]}, so one is missing or recorded twice"
        problem = Violation(line, problem=text)
    for span in basis.spans(record):
        excluded = span.raw.get("excluded", "")
        if not isinstance(excluded, str | bool):  # true is what earlier versions wrote
            problem = Violation(line, span.row, span.turn, problem=f"ids are excluded for the reason {excluded!r:.80}")
    problem = problem or _credit_problem(line, record, basis)
    for row, stored in enumerate(record["rows"]):
        shared = basis.shared_ids(record, row)
        ids = stored["spans"][0]["ids"] if stored["spans"] else []
        if shared is None or problem is not None:
            continue
        if ids[: len(shared)] != shared or not shared:
            token = first_difference(ids, shared)
            problem = Violation(line, row, token=token, problem="the fork does not begin with the ids of its row")
    ledger.check("once", problem)


def _credit_problem(line: int, record: Record, basis: Basis) -> Violation | None:
    """Returns the first reply whose exclusion is not the one that the label of its branch asks for."""
    origins = [stored.get("origin") for stored in record["rows"]]
    if not any(origins):
        return None
    labels: list[str] = []
    for origin in origins:
        labels.append(origin["label"] if origin else (labels or ["main"])[-1])
    for span in basis.spans(record):
        if span.source != "policy":
            continue
        label, reason = labels[span.row], span.raw.get("excluded", "")
        has_credit = basis.credit is None or label in basis.credit
        if not has_credit and not reason:
            text = f"a reply of the branch {label!r} is trained, and agent.credit leaves it out"
        elif reason in BRANCH_LABELS and (reason != label or (basis.credit is not None and has_credit)):
            text = f"a reply of the branch {label!r} is excluded as {reason!r}, and agent.credit does not leave it out"
        else:
            continue
        return Violation(line, span.row, span.turn, problem=text)
    return None
