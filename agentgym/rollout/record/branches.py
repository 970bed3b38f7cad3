"""The branches of recorded episodes: where each row begins, who asked for it, what it costs and what is excluded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentgym.trajectory import Row, Source

__all__ = ["BRANCH_COLUMNS", "Branch", "branch_lines", "branch_table", "branches_of", "is_tree"]

BRANCH_COLUMNS = ("branches", "rows", "tokens", "sampled", "trained", "excluded")


@dataclass(frozen=True, slots=True)
class Branch:
    """One row of an episode, as a report shows it."""

    label: str
    """The kind of the branch; empty for a conversation that the rollout leads."""
    start: str
    """The place where it begins, such as `row 0, after turn 2` or `history rewritten`; empty for one of its own."""
    client: str
    """The dialect and the program that asked; empty if that is not recorded."""
    first_turn: int
    num_turns: int
    num_tokens: int
    num_sampled: int
    excluded: Mapping[str, int]
    """The number of sampled ids in no loss, by reason."""

    @property
    def num_trained(self) -> int:
        """The number of sampled ids in the loss."""
        return self.num_sampled - sum(self.excluded.values())


def is_tree(rows: Sequence[Row]) -> bool:
    """Returns True if an episode has several rows, or ids that are in no loss."""
    return len(rows) > 1 or any(span.excluded for row in rows for span in row.spans)


def branches_of(rows: Sequence[Row]) -> list[Branch]:
    """Returns the branches of an episode's rows, in their order."""
    branches: list[Branch] = []
    first_turn = 0
    for row in rows:
        origin = row.origin
        sampled = [span for span in row.spans if span.source is Source.POLICY]
        excluded: Counter[str] = Counter()
        for span in sampled:
            if span.excluded:
                excluded[span.excluded] += len(span.ids)
        start = "history rewritten" if branches and _is_rewritten(row) else ""
        if origin is not None and origin.row is not None:
            start = f"row {origin.row}" + (f", after turn {origin.turn}" if origin.turn is not None else "")
        branches.append(
            Branch(
                label="" if origin is None else origin.label,
                start=start,
                client="" if origin is None else origin.client,
                first_turn=first_turn,
                num_turns=len(sampled),
                num_tokens=len(row),
                num_sampled=sum(len(span.ids) for span in sampled),
                excluded=dict(excluded),
            )
        )
        first_turn += len(sampled)
    return branches


def _is_rewritten(row: Row) -> bool:
    """Returns whether a later row that forks none goes on with a conversation, in other words."""
    is_main = row.origin is None or row.origin.label == "main"
    return is_main or any(message.role == "assistant" for message in row.messages or ())


def branch_lines(rows: Sequence[Row]) -> list[str]:
    """Returns an episode's tree as text, a line for each row."""
    branches = branches_of(rows)
    lines = [f"tree: {len(branches)} rows, {_costs(branches)}"]
    for number, branch in enumerate(branches):
        last = branch.first_turn + branch.num_turns - 1
        turns = f"turns {branch.first_turn}-{last}" if branch.num_turns > 1 else f"turn {branch.first_turn}"
        place = f"{branch.label or 'main'} ({branch.start})" if branch.start else branch.label or "main"
        client = f", asked by {branch.client}" if branch.client else ""
        lines.append(
            f"    row {number}: {place}, {turns if branch.num_turns else 'no turn'}, {_costs([branch])}{client}"
        )
    return lines


def branch_table(episodes: Iterable[Sequence[Row]]) -> list[list[str]]:
    """Returns the rows of a table over the episodes of a run, by label; none if no episode is a tree."""
    by_label: dict[str, list[Branch]] = {}
    trees = False
    for rows in episodes:
        trees = trees or is_tree(rows)
        for branch in branches_of(rows):
            by_label.setdefault(branch.label or "main", []).append(branch)
    if not trees:
        return []
    total = [branch for branches in by_label.values() for branch in branches]
    groups = [*sorted(by_label.items()), *([("all", total)] if len(by_label) > 1 else [])]
    return [[label, f"{len(branches):,}", *_counts(branches)] for label, branches in groups]


def _counts(branches: Sequence[Branch]) -> list[str]:
    excluded: Counter[str] = Counter()
    for branch in branches:
        excluded.update(branch.excluded)
    numbers = [sum(getattr(each, name) for each in branches) for name in ("num_tokens", "num_sampled", "num_trained")]
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(excluded.items()))
    return [*(f"{number:,}" for number in numbers), reasons]


def _costs(branches: Sequence[Branch]) -> str:
    tokens, sampled, trained, excluded = _counts(branches)
    return f"{tokens} tokens, {sampled} sampled, {trained} trained" + (f", excluded {excluded}" if excluded else "")
