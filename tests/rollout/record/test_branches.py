"""The report of an episode's tree counts each token where it is, and names each exclusion."""

from __future__ import annotations

from agentgym.rollout.record.branches import branch_lines, branch_table, branches_of, is_tree
from agentgym.trajectory import Row, RowOrigin, Source, TokenSpan
from agentgym.types import Message

CLIENT = "responses codex_exec/0.171.0"


def sampled(count: int, excluded: str = "") -> TokenSpan:
    return TokenSpan((5,) * count, Source.POLICY, (-0.5,) * count, (0,) * count, excluded=excluded)


def prompt(count: int, source: Source = Source.PROMPT) -> TokenSpan:
    return TokenSpan((4,) * count, source)


ASK = (Message("user", "ask"),)
EDITED = (*ASK, Message("assistant", "a reply"), *ASK)
FORK = RowOrigin("fork", 0, 1, 3)
ROWS = (
    Row((prompt(10), sampled(2), prompt(3, Source.ENV), sampled(4)), ASK),
    Row((prompt(20), sampled(1), prompt(1, Source.ENV), sampled(5, "unused")), EDITED, None, FORK),
    Row((prompt(1000), sampled(3, "title")), ASK, None, RowOrigin("title", client=CLIENT)),
    Row((prompt(5),), EDITED, None, RowOrigin("side")),
    Row((prompt(5), sampled(1)), ASK),
)


def test_a_tree_has_a_line_for_each_row() -> None:
    assert branch_lines(ROWS) == [
        "tree: 5 rows, 1,060 tokens, 16 sampled, 8 trained, excluded 3 title, 5 unused",
        "    row 0: main, turns 0-1, 19 tokens, 6 sampled, 6 trained",
        "    row 1: fork (row 0, after turn 1), turns 2-3, 27 tokens, 6 sampled, 1 trained, excluded 5 unused",
        f"    row 2: title, turn 4, 1,003 tokens, 3 sampled, 0 trained, excluded 3 title, asked by {CLIENT}",
        "    row 3: side (history rewritten), no turn, 5 tokens, 0 sampled, 0 trained",
        "    row 4: main (history rewritten), turn 5, 6 tokens, 1 sampled, 1 trained",
    ]
    assert sum(branch.num_tokens for branch in branches_of(ROWS)) == sum(map(len, ROWS))
    assert sum(branch.num_trained for branch in branches_of(ROWS)) == sum(row.num_trained_tokens for row in ROWS)


def test_a_run_without_trees_has_no_table_and_another_one_counts_by_label() -> None:
    assert branch_table([ROWS[:1], ROWS[:1]]) == [] and not is_tree(ROWS[:1]) and is_tree(ROWS[1:2])
    assert branch_table([ROWS, ROWS[:1]]) == [
        ["fork", "1", "27", "6", "1", "5 unused"],
        ["main", "3", "44", "13", "13", ""],
        ["side", "1", "5", "0", "0", ""],
        ["title", "1", "1,003", "3", "0", "3 title"],
        ["all", "6", "1,079", "22", "14", "3 title, 5 unused"],
    ]
