"""Bytes and CPU time for each token of recorded episodes: as plain lines, compressed, and without tokens.

The episodes are those of run folders, and replies of 2,000 tokens: English text of `docs/` with random fp32 logprobs,
which no compression shortens, in groups of 8 that share a prompt of 500; no text occurs twice. `fp64 digits` writes
fp32 numbers as Python prints them, with 17 digits. Writing includes the JSON text, reading the trajectories.

    python benchmarks/records.py [RUN ...] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.model.model_name import model_folder
from agentgym.rollout.record.episodes_file import EpisodeRecord, EpisodeWriter, read_episodes
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn, shortest_floats
from agentgym.types import Message, Task
from agentgym.viewer import read_run

DOCS = Path(__file__).parent.parent / "docs"
COLUMNS = ("bytes", "write", "read", "view", "verify")
GROUPS, GROUP, PROMPT, REPLY = 8, 8, 500, 2_000


def long_replies() -> list[EpisodeRecord]:
    """Returns episodes of one long reply."""
    tokenizer = ChatTokenizer.load(model_folder("embedded"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    ids, random = tokenizer.encode(text), np.random.default_rng(0)

    position = 0

    def cut(length: int) -> tuple[int, ...]:
        nonlocal position
        position += length
        assert position <= len(ids), "a text that occurs twice would be compressed"
        return tuple(ids[position - length : position])

    records = []
    for number in range(GROUPS):
        prompt = cut(PROMPT)
        messages = (Message("user", tokenizer.backend.decode(prompt)),)
        for member in range(GROUP):
            reply, logprobs = cut(REPLY), np.log(random.beta(0.6, 0.4, REPLY).clip(1e-6))
            sampled = TokenSpan(reply, Source.POLICY, shortest_floats(logprobs.tolist()), (0,) * REPLY)
            row = Row((TokenSpan(prompt, Source.PROMPT), sampled), messages)
            turns = (Turn(Message("assistant", tokenizer.backend.decode(reply)), float(random.integers(2))),)
            ended = Status.COMPLETED, StopReason.TERMINATED
            episode = Trajectory(Task("X-v0", number), f"{number}", member, (row,), turns, *ended)
            advantage = shortest_floats([float(random.normal())]) * REPLY
            records.append(EpisodeRecord(episode, "train", 1, (advantage,)))
    return records


def widen(record: EpisodeRecord) -> EpisodeRecord:
    """Returns the episode with the 17 digits of each fp32 number."""

    def wide(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(np.asarray(values, np.float32).tolist())

    rows = tuple(
        replace(row, spans=tuple(s if s.logprobs is None else replace(s, logprobs=wide(s.logprobs)) for s in row.spans))
        for row in record.trajectory.rows
    )
    advantages = None if record.advantages is None else tuple(map(wide, record.advantages))
    return replace(record, trajectory=replace(record.trajectory, rows=rows), advantages=advantages)


def write(folder: Path, records: Sequence[EpisodeRecord], **form: bool) -> None:
    """Writes the episodes, those of a step in one call."""
    with EpisodeWriter(folder, **form) as writer:
        for place in sorted({(record.step, record.phase) for record in records}):
            own = [record for record in records if (record.step, record.phase) == place]
            credit = [record.advantages for record in own]
            writer.write([record.trajectory for record in own], step=place[0], phase=place[1], advantages=credit)


def cpu_s(run: Callable[[], object]) -> float:
    """Returns the least CPU seconds of three calls."""
    times = []
    for _ in range(3):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)


def measure(records: Sequence[EpisodeRecord], **form: bool) -> dict[str, float]:
    """Returns bytes a token, and CPU milliseconds for 1,000 tokens."""
    num_tokens = sum(record.trajectory.num_tokens for record in records)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def write_anew() -> None:
            for path in folder.iterdir():
                path.unlink()
            write(folder, records, **form)

        per_thousand = 1e6 / num_tokens
        return {
            "write": cpu_s(write_anew) * per_thousand,
            "bytes": sum(path.stat().st_size for path in folder.glob("episodes*")) / num_tokens,
            "read": cpu_s(lambda: sum(1 for _ in read_episodes(folder))) * per_thousand,
            "view": cpu_s(lambda: read_run(folder)) * per_thousand,
            "verify": cpu_s(lambda: verify_run(folder)) * per_thousand,
        }


def main() -> None:
    """Prints a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    workloads = {run.name: list(read_episodes(run)) for run in options.runs} | {"long replies": long_replies()}
    report = {}
    for name, records in workloads.items():
        report[name] = {
            "plain, fp64 digits": measure([widen(record) for record in records]),
            "plain": measure(records),
            "compressed": measure(records, compress=True),
            "compressed, no tokens": measure(records, compress=True, tokens=False),
        }
    if options.json:
        print(json.dumps(report))
        return
    for name, forms in report.items():
        print(
            f"\n{name:<24}" + "".join(f"{column:>12}" for column in ("bytes/token", "write", "read", "view", "verify"))
        )
        for form, row in forms.items():
            numbers = [row[column] for column in ("bytes", "write", "read", "view", "verify")]
            print(f"{form:<24}" + "".join(f"{number:>12.2f}" for number in numbers))
    print("\nbytes for each token; write, read, view and verify in CPU milliseconds for 1,000 tokens")


if __name__ == "__main__":
    main()
