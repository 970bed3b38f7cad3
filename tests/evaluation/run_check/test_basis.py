"""A turn that is remembered is checked as if it were not."""

from __future__ import annotations

import copy
import json
import marshal
import math
import random
from pathlib import Path
from typing import Any

from agentgym.chat_templates.families import renderer_for
from agentgym.embedded import embedded_folder
from agentgym.evaluation.run_check.basis import Basis, Memo
from agentgym.evaluation.run_check.record_checks import CHECKS
from agentgym.evaluation.run_check.verify import PROPERTIES
from agentgym.rollout.record.episode_digests import credit_digest, mask_runs, row_digest
from agentgym.rollout.record.ledger import Ledger, PropertyTally
from agentgym.rollout.record.line_reader import LineReader
from agentgym.rollout.record.stored_fields import NO_EPISODE
from agentgym.rollout.record.tools_file import read_menus

Record = dict[str, Any]
VALUES = [None, True, 0, 1, -1, 1.5, math.nan, math.inf, 2**31, 2**64, 1982, "", "x", "env", "length", "<|im_end|>", []]
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
    record["credit"] = credit_digest([turn["reward"] for turn in record["turns"]], record["advantages"])


def tallies(record: Record, basis: Basis) -> dict[str, PropertyTally] | None:
    """Returns the checks of a record by property; None if it is no episode."""
    ledger = Ledger()
    try:
        for check in CHECKS:
            check(ledger, 1, record, basis)
    except NO_EPISODE:
        return None
    return {entry.name: ledger.tally(entry.name) for entry in PROPERTIES}


def is_sound(counts: dict[str, PropertyTally] | None) -> bool:
    return counts is not None and not any(tally.num_failed for tally in counts.values())


def test_a_damaged_record_is_judged_alike_by_a_basis_that_remembers_turns(finished_run: Path) -> None:
    menus, rng, renderer = read_menus(finished_run), random.Random(1), renderer_for(embedded_folder())
    with LineReader(finished_run / "episodes.jsonl.zst") as lines:
        records = [json.loads(line) for line in lines]
    basis, num_sound = Basis(renderer, menus, 0), 0
    stored = [marshal.dumps(record) for record in records]  # a deep copy takes longer than all that is checked
    for record in records:
        assert is_sound(tallies(record, basis))
    for _ in range(600):
        record = marshal.loads(rng.choice(stored))
        damage(record, rng)
        if rng.random() < 0.7:
            try:
                renew_digests(record)
            except NO_EPISODE:
                continue  # it is no episode any more
        counts = tallies(record, basis)
        assert counts == tallies(record, Basis(renderer, menus, 0))
        num_sound += is_sound(counts)
    assert 5 < num_sound < 400, "damages are noticed, and some are of what no check reads"
    assert basis.sound_turns


def test_what_is_remembered_is_bounded_by_its_size() -> None:
    memo: Memo[int] = Memo(10)
    for number in range(4):
        memo.store(bytes([number]), number, 3)
    assert list(memo) == [b"\x03"]
