"""The tasks of Terminal-v0: files, a task in words, the files that should result, and commands that do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["TASKS", "TerminalTask", "draw_task"]

WORDS = """
amber basin cedar delta ember fjord grove haven inlet jetty knoll larch maple north ocean plain quarry ridge shore
thorn umber valley willow yonder zephyr
""".split()
NAMES = "ada ben cleo dan eve finn gus hana ivo jill".split()


@dataclass(frozen=True, kw_only=True)
class TerminalTask:
    """One task; `after` holds every file that should be there at the end, and no other may be."""

    text: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    solution: str
    """The shell commands that do the task."""

    def is_done(self, files: Mapping[str, bytes]) -> bool:
        """True if these are the files that should be there; blanks at the end of a file do not count."""
        target = {path: content.rstrip().encode() for path, content in self.after.items()}
        return {path: content.rstrip() for path, content in files.items()} == target


class _Draw:
    """The source of random parts of tasks."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def number(self, low: int, high: int) -> int:
        return int(self._random.integers(low, high + 1))

    def words(self, count: int) -> list[str]:
        """Draws different words."""
        return [WORDS[index] for index in self._random.choice(len(WORDS), count, replace=False)]

    def text(self, num_lines: int) -> str:
        return "".join(f"{' '.join(self.words(self.number(2, 5)))}\n" for _ in range(num_lines))

    def files(self, names: list[str]) -> dict[str, str]:
        return {name: self.text(self.number(2, 6)) for name in names}


def _rename(draw: _Draw) -> TerminalTask:
    old, new, *others = draw.words(4)
    before = draw.files([f"{name}.txt" for name in (old, *others)])
    after = {(f"{new}.txt" if path == f"{old}.txt" else path): content for path, content in before.items()}
    text = f"Rename {old}.txt to {new}.txt."
    return TerminalTask(text=text, before=before, after=after, solution=f"mv {old}.txt {new}.txt")


def _remove(draw: _Draw) -> TerminalTask:
    names = draw.words(6)
    cut = draw.number(1, 5)
    before = draw.files([f"{name}.{'bak' if index < cut else 'txt'}" for index, name in enumerate(names)])
    after = {path: content for path, content in before.items() if path.endswith(".txt")}
    return TerminalTask(text="Remove every file that ends in .bak.", before=before, after=after, solution="rm *.bak")


def _count(draw: _Draw) -> TerminalTask:
    name, other, result = draw.words(3)
    before = {f"{name}.txt": draw.text(draw.number(5, 60)), f"{other}.txt": draw.text(draw.number(5, 60))}
    number = before[f"{name}.txt"].count("\n")
    return TerminalTask(
        text=f"Write the number of lines of {name}.txt to {result}.txt, as digits alone.",
        before=before,
        after={**before, f"{result}.txt": str(number)},
        solution=f"grep -c '' {name}.txt > {result}.txt",
    )


def _total(draw: _Draw) -> TerminalTask:
    rows = [(NAMES[draw.number(0, 9)], draw.number(1, 99)) for _ in range(draw.number(8, 20))]
    table = "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)
    whose = rows[0][0]
    total = sum(amount for name, amount in rows if name == whose)
    file = f"{draw.words(1)[0]}.csv"
    return TerminalTask(
        text=f"{file} has the columns name and amount. Write the sum of all amounts of {whose} to total.txt.",
        before={file: table},
        after={file: table, "total.txt": str(total)},
        solution=f"awk -F, '$1 == \"{whose}\" {{ s += $2 }} END {{ print s }}' {file} > total.txt",
    )


def _search(draw: _Draw) -> TerminalTask:
    word = draw.words(1)[0]
    before = {f"logs/{name}.log": draw.text(6) for name in draw.words(5)}
    first = min(before)
    before[first] += f"{word} once more\n"
    lines = sorted({line for text in before.values() for line in text.splitlines() if word in line.split()})
    return TerminalTask(
        text=f"Write all lines in logs/ with the word {word} to found.txt, each once, in alphabetical order.",
        before=before,
        after={**before, "found.txt": "\n".join(lines)},
        solution=f"cat logs/*.log | grep -w {word} | LC_ALL=C sort -u > found.txt",
    )


def _replace(draw: _Draw) -> TerminalTask:
    old, new = draw.words(2)
    before = {f"notes/{name}.md": draw.text(4) for name in draw.words(4)}
    before[min(before)] += f"{old} {old} end\n"
    after = {
        path: "".join(
            " ".join(new if word == old else word for word in line.split()) + "\n" for line in content.splitlines()
        )
        for path, content in before.items()
    }
    text = f"Replace the word {old} by {new} in every file in notes/."
    return TerminalTask(text=text, before=before, after=after, solution=f"sed -i 's/\\b{old}\\b/{new}/g' notes/*.md")


def _sort_out(draw: _Draw) -> TerminalTask:
    kinds = ("csv", "log", "txt")
    names = draw.words(9)
    endings = [*kinds, *(kinds[draw.number(0, 2)] for _ in names[3:])]
    before = draw.files([f"{name}.{kind}" for name, kind in zip(names, endings, strict=True)])
    after = {f"{path.rpartition('.')[2]}/{path}": content for path, content in before.items()}
    return TerminalTask(
        text="Move each file into a folder that is named as its ending: a.csv to csv/a.csv, and so on.",
        before=before,
        after=after,
        solution="for f in *.*; do mkdir -p ${f##*.}; mv $f ${f##*.}/; done",
    )


def _ranking(draw: _Draw) -> TerminalTask:
    totals: Counter[str] = Counter()
    lines = []
    for _ in range(draw.number(15, 30)):
        name, amount = NAMES[draw.number(0, 5)], draw.number(1, 99)
        totals[name] += amount
        lines.append(f"{draw.words(1)[0]};{name};{amount}\n")
    ranked = sorted(totals.items(), key=lambda entry: (-entry[1], entry[0]))
    table = "".join(lines)
    file = f"{draw.words(1)[0]}.txt"
    program = "{ s[$2] += $3 } END { for (n in s) print n, s[n] }"
    return TerminalTask(
        text=f"{file} has lines item;name;amount. Write a line with each name, a blank and the sum of its amounts to "
        "ranking.csv: the largest sum first, equal ones in the order of their names.",
        before={file: table},
        after={file: table, "ranking.csv": "".join(f"{name} {total}\n" for name, total in ranked)},
        solution=f"awk -F';' '{program}' {file} | LC_ALL=C sort -k2,2nr -k1,1 > ranking.csv",
    )


def _merge(draw: _Draw) -> TerminalTask:
    names = draw.words(5)
    before = {f"parts/{name}.txt": draw.text(draw.number(1, 4)) for name in names}
    long_paths = [path for path in sorted(before) if before[path].count("\n") > 1]
    if not long_paths:
        long_paths = [min(before)]
        before[long_paths[0]] = draw.text(3)
    return TerminalTask(
        text="Join the files in parts/ that have more than one line, in the order of their names, to whole.txt, and "
        "remove the folder parts.",
        before=before,
        after={"whole.txt": "".join(before[path] for path in long_paths)},
        solution="for f in parts/*; do [ $(grep -c '' $f) -gt 1 ] && cat $f; done > whole.txt; rm -r parts",
    )


TASKS: Mapping[int, tuple[Callable[[_Draw], TerminalTask], ...]] = {
    1: (_rename, _remove, _count),
    2: (_total, _search, _replace),
    3: (_sort_out, _ranking, _merge),
}
"""Maps a level to its kinds of tasks."""


def draw_task(level: int, random: np.random.Generator) -> TerminalTask:
    """A task of a level."""
    kinds = TASKS[level]
    return kinds[int(random.integers(len(kinds)))](_Draw(random))
