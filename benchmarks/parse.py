"""The speed of parsing replies: `python benchmarks/parse.py [--replies FOLDER] [--family NAME ...] [--mb 10]`.

First, MB of model text a second: replies with reasoning, text and calls through the Hermes format, against the least
that reading them takes (one regular expression, and json.loads of what it finds). With `--replies`, a folder of
FAMILY.jsonl files with rows {"text", "tools"}, every format reads its own. Then hostile texts through every format, at
growing sizes: CPU seconds for a MB at the largest size over those at the smallest; about 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.openai_wire import tool_from_openai
from agentgym.types import ToolSpec

MB = 1_000_000
SLOWER = 2.0
"""The growth of the seconds for a MB that still counts as linear."""
WORDS = "the door to north is locked and a key lies under an old lamp so we look there first then go back".split()
BODY = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def reply(rng: random.Random) -> str:
    """Returns a reply as Hermes models write it: some 150 words of reasoning, a sentence, one to three calls."""

    def words(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    thought = "\n\n".join(words(rng.randrange(20, 60)) for _ in range(4))
    calls = []
    for _ in range(rng.randrange(1, 4)):
        arguments = {
            "path": f"src/{rng.choice(WORDS)}.py",
            "query": words(8),
            "content": "\n".join(f"    x = '{words(6)}'" for _ in range(6)),
            "limits": [rng.randrange(100), rng.random(), None, True],
            "options": {"case": False, "within": {"from": rng.randrange(99), "to": "end"}},
        }
        body = json.dumps({"name": "search_files", "arguments": arguments})
        calls.append(f"<tool_call>\n{body}\n</tool_call>")
    return f"<think>\n{thought}\n</think>\n\n{words(20)}.\n" + "\n".join(calls)


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Returns CPU seconds, the best of some runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def throughput(
    texts: Sequence[tuple[str, Sequence[ToolSpec]]], read_text: Callable[[str, Sequence[ToolSpec]], object]
) -> float:
    """Returns MB of UTF-8 a second."""
    size = sum(len(text.encode()) for text, _ in texts)
    return size / MB / seconds(lambda: [read_text(text, tools) for text, tools in texts])


def least(text: str, tools: Sequence[ToolSpec]) -> list[object]:
    """Does the least that any reader of such calls has to do."""
    return [json.loads(body) for body in BODY.findall(text)]


def compare_hermes() -> None:
    """Prints MB/s of Hermes replies, ours and the least."""
    rng = random.Random(0)
    texts = [(reply(rng), ()) for _ in range(1500)]
    base, ours = throughput(texts, least), throughput(texts, FORMATS["hermes"].parse)
    size = sum(len(text) for text, _ in texts) / len(texts)
    print(f"Hermes replies of {size:.0f} characters{'':8}{'MB/s':>10}{'ratio':>8}")
    print(f"{'regular expression and json.loads':40}{base:10.1f}{1:8.2f}")
    print(f"{'ours':40}{ours:10.1f}{ours / base:8.2f}\n")


def read_corpus(folder: Path, names: Sequence[str]) -> None:
    """Prints MB/s of each family's own replies in `folder`."""
    print(f"{'replies of ' + folder.name:40}{'MB/s':>10}{'replies':>9}")
    for file in sorted(folder.glob("*.jsonl")):
        if file.stem not in FORMATS or FORMATS[file.stem].name not in names:
            continue
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        texts = [(row["text"], tuple(map(tool_from_openai, row["tools"] or ()))) for row in rows]
        rate = throughput(texts * 20, FORMATS[file.stem].parse)
        print(f"{file.stem:40}{rate:10.1f}{len(rows):9}")
    print()


def hostile(marks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the names of hostile texts, and the pieces that they repeat."""
    yield from (("{", "{"), ("[", "["), ('"', '"'), ("\\", "\\"), ("'", "'"), ("(", "("), ("<", "<"))
    yield from (('{"a":', '{"a":'), ("f(a=", "f(a="), ("newlines", "\n"), ("spaces", " "), ("digits", "7"))
    yield from ((mark, mark) for mark in marks)
    if marks:
        yield "all marks", "".join(marks)
        yield "all marks, reversed", "".join(reversed(marks))
        yield "marks and JSON", "".join(f'{mark}{{"name": "f", "arguments": {{"a": "' for mark in marks)
        yield "marks and text", " x\n".join(marks)


@dataclass(frozen=True)
class Growth:
    """The growth of the cost of one hostile text with its length."""

    name: str
    ratio: float
    """CPU seconds for a MB at the largest size, over those at the smallest."""
    cost: float
    """CPU seconds for a MB at the largest size."""
    size: float
    """The largest size that was read, in MB."""

    @property
    def is_linear(self) -> bool:
        """True if the last MB cost as much as the first, apart from caches and the allocator."""
        return self.ratio <= SLOWER or self.cost < 0.02


def growth(reply_format: ReplyFormat, name: str, text: str, sizes: Sequence[float], opening: str = "") -> Growth:
    """Parses a text repeated up to each of the sizes; ends at the first that is not linear, measured twice."""

    def cost(size: float) -> float:
        whole = opening + text * max(1, int(size * MB / len(text)))
        return seconds(lambda: reply_format.parse(whole), 3 if size < 3 else 1) / size

    first = cost(sizes[0])
    curve = Growth(name, 1.0, first, sizes[0])
    for size in sizes[1:]:
        curve = Growth(name, (last := cost(size)) / first, last, size)
        if not curve.is_linear:  # or the machine was busy
            first, last = min(first, cost(sizes[0])), min(last, cost(size), cost(size))
            curve = Growth(name, last / first, last, size)
        if not curve.is_linear:
            break
    return curve


def measure_growth(reply_format: ReplyFormat, largest: float) -> list[Growth]:
    """Measures each hostile text at 1, 3 and 10 MB, and after each of the format's marks at up to 1 MB."""
    sizes = [size for size in (1.0, 3.0, 10.0) if size <= largest]
    results = []
    for name, text in hostile(reply_format.marks):
        results.append(growth(reply_format, name, text, sizes))
        if text in reply_format.marks or text.isspace() or "marks" in name:
            continue
        for mark in reply_format.marks:
            small = growth(reply_format, f"{mark} {name}", text, (0.1, 1.0), mark)
            results.append(small if small.is_linear else growth(reply_format, small.name, text, sizes, mark))
    return results


def show_growth(names: Sequence[str], largest: float) -> bool:
    """Prints each format's worst text; returns True if all were linear."""
    print(f"{'format':18}{'texts':>6}{'growth':>8}{'s/MB':>8}{'at MB':>7}  the worst text, repeated")
    sound = True
    for name in names:
        results = measure_growth(FORMATS[name], largest)
        slow = [entry for entry in results if not entry.is_linear]
        for worst in slow or [max(results, key=lambda entry: entry.cost)]:
            figures = f"{worst.ratio:8.2f}{worst.cost:8.3f}{worst.size:7.1f}"
            print(f"{name:18}{len(results):6}{figures}  {worst.name!r:.60}{' NOT LINEAR' if slow else ''}", flush=True)
        sound = sound and not slow
    return sound


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replies", type=Path, help="folder of FAMILY.jsonl files")
    parser.add_argument("--family", nargs="*", default=None, help="only these")
    parser.add_argument("--mb", type=float, default=10.0, help="the largest hostile text")
    options = parser.parse_args()
    names = list(dict.fromkeys(FORMATS[name].name for name in options.family or FORMATS))
    compare_hermes()
    if options.replies is not None:
        read_corpus(options.replies, names)
    if not show_growth(names, options.mb):
        raise SystemExit("some texts take more than linear time")


if __name__ == "__main__":
    main()
