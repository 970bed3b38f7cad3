"""A record that is recognized as sound has no violation by the exact checks, and as many checks."""

from __future__ import annotations

import copy
import json
import marshal
import math
import random
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.embedded import embedded_folder
from agentgym.evaluation.run_check.basis import Basis, Memo
from agentgym.evaluation.run_check.record_checks import CHECKS
from agentgym.evaluation.run_check.sound_records import SoundRecords
from agentgym.evaluation.run_check.verify import PROPERTIES
from agentgym.rollout.record.episode_digests import credit_digest, mask_runs, row_digest
from agentgym.rollout.record.ledger import Ledger
from agentgym.rollout.record.line_reader import LineReader
from agentgym.rollout.record.tools_file import read_menus

Record = dict[str, Any]
VALUES = [None, True, False, 0, 1, -1, 1.5, 1e-7, math.nan, math.inf, 2**31, 2**64, 1982, -(2**63), "", "x", "policy"]
VALUES += [
    "prompt",
    "env",
    "length",
    "stop",
    "completed",
    "truncated",
    "terminated",
    "max_turns",
    "<|im_end|>",
    [],
    [1],
    {},
]
NAMES = ["x", "excluded", "experts", "logprobs", "policy_versions", "asked", "messages", "stop", "tools", "raw", "name"]


def damage(record: Record, rng: random.Random) -> None:
    """Changes, drops, adds or moves a value at a place that is drawn level by level, from the record or a span down."""
    holder: Any = rng.choice([record, rng.choice(record["rows"][0]["spans"])])
    key: Any = rng.choice(list(holder))
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.9:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    value, kind = holder[key], rng.random()
    if kind < 0.15:
        del holder[key]
    elif kind < 0.3 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder)), copy.deepcopy(value))
    elif kind < 0.4 and isinstance(holder, dict):
        holder[rng.choice(NAMES)] = rng.choice([True, rng.choice(VALUES)])
    elif kind < 0.8 and isinstance(value, int | float):
        holder[key] = rng.choice([value + 1, value - 1, -value, value * 2, value + 0.5, math.inf, 2000])
    elif kind < 0.8 and isinstance(value, str):
        holder[key] = rng.choice([f"{value} ", value[1:], value.upper(), f"{value}<|im_end|>"])
    else:
        holder[key] = rng.choice(VALUES)


def renew_digests(record: Record) -> None:
    """Writes the mask and the digests that a damaged record would have had from the first."""
    for row in record["rows"]:
        row["mask"], row["digest"] = mask_runs(row["spans"]), row_digest(row["spans"])
    record["reward"] = math.fsum(turn["reward"] for turn in record["turns"])
    record["credit"] = credit_digest([turn["reward"] for turn in record["turns"]], record["advantages"])


def records_of(run: Path) -> list[Record]:
    with LineReader(run / "episodes.jsonl.zst") as lines:
        return [json.loads(line) for line in lines]


def exact_counts(record: Record, basis: Basis) -> dict[str, int]:
    """Returns the number of checks by property, all of which found nothing; raises if one found something."""
    ledger = Ledger()
    for check in CHECKS:
        check(ledger, 1, record, basis)
    tallies = {entry.name: ledger.tally(entry.name) for entry in PROPERTIES}
    assert not {name: tally.first for name, tally in tallies.items() if tally.num_failed}
    counts = {name: tally.num_checked for name, tally in tallies.items() if tally.num_checked}
    return {**counts, "tokens": sum(len(span["ids"]) for row in record["rows"] for span in row["spans"])}


@pytest.mark.parametrize("renderer", [renderer_for(embedded_folder()), None], ids=["tokenizer", "none"])
def test_a_damaged_record_is_recognized_only_if_the_exact_checks_find_nothing(
    renderer: Renderer | None, finished_run: Path
) -> None:
    records, menus, rng = records_of(finished_run), read_menus(finished_run), random.Random(1)
    sound, num_recognized = SoundRecords(Basis(renderer, menus, 0)), 0
    for record in records:
        assert sound.counts(record) == exact_counts(record, Basis(renderer, menus, 0))
    stored = [marshal.dumps(record) for record in records]  # a deep copy takes longer than all that is checked
    for _ in range(3000):
        record = marshal.loads(rng.choice(stored))
        damage(record, rng)
        if rng.random() < 0.7:
            try:
                renew_digests(record)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError):
                continue  # it is no episode any more
        counts = sound.counts(record)
        if counts is not None:
            num_recognized += 1
            assert counts == exact_counts(record, Basis(renderer, menus, 0))
    assert 20 < num_recognized < 2000, "damages are noticed, and some are of what no check reads"


def test_what_is_remembered_is_bounded_by_its_size() -> None:
    memo: Memo[int] = Memo(10)
    for number in range(4):
        memo.store(bytes([number]), number, 3)
    assert list(memo) == [b"\x03"]


def in_two_rows(record: Record) -> Record:
    """The same episode with a row that begins anew after the first reply."""
    record = copy.deepcopy(record)
    (row,), (advantages,) = record["rows"], record["advantages"] or [[]]
    first, (answer, *rest) = row["spans"][:2], row["spans"][2:]
    prompt = {"source": "prompt", "ids": [token for span in (*first, answer) for token in span["ids"]]}
    number = len(first[1]["ids"])
    record["rows"] = [{"spans": first}, {"spans": [prompt, *rest]}]
    record["advantages"] = [advantages[:number], advantages[number:]] if advantages else None
    renew_digests(record)
    return record


def test_versions_that_fall_between_rows_are_no_sound_record(finished_run: Path) -> None:
    records = [record for record in records_of(finished_run) if len(record["turns"]) > 1]
    record = in_two_rows(records[0])
    found = SoundRecords(Basis(None, {}, None)).counts(record)
    assert found == exact_counts(record, Basis(None, {}, None))
    assert found["digest"] == 2
    for version, row in zip((2, 1), record["rows"], strict=True):
        for span in row["spans"][1::2]:
            span["policy_versions"] = [version] * len(span["ids"])
    renew_digests(record)
    assert SoundRecords(Basis(None, {}, None)).counts(record) is None
    with pytest.raises(AssertionError, match="policy version 1 follows 2"):
        exact_counts(record, Basis(None, {}, None))
