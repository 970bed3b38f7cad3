"""Draws small programming problems: a sentence, a solution, and cases whose values the solution gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentgym.envs.tasks.code.machine import draw_machine
from agentgym.envs.tasks.code.problem import CodeProblem

__all__ = ["LEVELS", "draw_problem"]

NAMES = ("solve", "compute", "work_out", "process", "evaluate", "derive", "answer_for", "result_of")
NUM_CASES = 24
NUM_SHOWN = 3
MIN_VALUES = 5
"""The fewest different values of the cases; with fewer they are drawn again, as a constant would pass too many."""
MOST, LONGEST = 20, 10

PREDICATES = (
    ("greater than {k}", "x > {k}"),
    ("less than {k}", "x < {k}"),
    ("at least {k}", "x >= {k}"),
    ("divisible by {d}", "x % {d} == 0"),
    ("not divisible by {d}", "x % {d} != 0"),
    ("different from {k}", "x != {k}"),
    ("odd", "x % 2 == 1"),
    ("even", "x % 2 == 0"),
)
MAPS = (
    ("multiplied by {d}", "x * {d}"),
    ("increased by {d}", "x + {d}"),
    ("squared", "x * x"),
    ("taken from {k}", "{k} - x"),
    ("replaced by its remainder when divided by {d}", "x % {d}"),
    ("replaced by its distance from {k}", "abs(x - {k})"),
)
FOLDS = (
    ("the number of them", "len(chosen)"),
    ("their sum", "sum(chosen)"),
    ("the largest of them, or None where there are none", "max(chosen, default=None)"),
    ("the smallest of them, or None where there are none", "min(chosen, default=None)"),
    ("the list of them, in their order", "chosen"),
)
WIDE_FOLDS = (
    *FOLDS,
    ("how many different ones there are", "len(set(chosen))"),
    ("the list of them, from the largest to the smallest", "sorted(chosen, reverse=True)"),
    ("the sum of every second of them, beginning with the first", "sum(chosen[::2])"),
    ("the first minus the last of them, or 0 where there are none", "chosen[0] - chosen[-1] if chosen else 0"),
)
SCANS = (
    (
        "the length of the longest run of neighbours that are {predicate}",
        "    best = run = 0\n    for x in numbers:\n        run = run + 1 if {test} else 0\n"
        "        best = max(best, run)\n    return best\n",
    ),
    (
        "the largest sum of {w} neighbours, or None where there are fewer numbers",
        "    sums = [sum(numbers[i : i + {w}]) for i in range(len(numbers) - {w} + 1)]\n"
        "    return max(sums, default=None)\n",
    ),
    (
        "the number of pairs of positions i < j whose numbers have a sum that is divisible by {d}",
        "    return sum((x + y) % {d} == 0 for i, x in enumerate(numbers) for y in numbers[i + 1 :])\n",
    ),
    (
        "a dict from each remainder by {d} that occurs to the sum of the numbers with it",
        "    sums = {{}}\n    for x in numbers:\n        sums[x % {d}] = sums.get(x % {d}, 0) + x\n    return sums\n",
    ),
    (
        "the length of the longest subsequence (not only neighbours) in which each number is greater than the one "
        "before it by at least {w}",
        "    longest = []\n    for j, x in enumerate(numbers):\n"
        "        before = [longest[i] for i in range(j) if x - numbers[i] >= {w}]\n"
        "        longest.append(1 + max(before, default=0))\n    return max(longest, default=0)\n",
    ),
    (
        "the list of what is left when, from left to right, a number that is the negative of the last one left, or has "
        "the same remainder by {d} as it, is removed together with it",
        "    left = []\n    for x in numbers:\n        if left and (left[-1] == -x or (left[-1] - x) % {d} == 0):\n"
        "            left.pop()\n        else:\n            left.append(x)\n    return left\n",
    ),
)
LIST_TASK = "takes a list of whole numbers"


@dataclass(frozen=True)
class _Task:
    """A function to write: its task in words, its parameter, its body, and the function that draws an argument."""

    told: str
    parameter: str
    body: str
    argument: Callable[[np.random.Generator], Any]


def draw_problem(level: int, draw: np.random.Generator) -> CodeProblem:
    """A problem of a level, with examples in its text and cases that are not among them."""
    name = _pick(NAMES, draw)
    while True:
        task = LEVELS[level](draw)
        solution = f"def {name}({task.parameter}):\n{task.body}"
        names: dict[str, Any] = {}
        exec(compile(solution, "solution", "exec"), names)  # our own text, from the tables above
        arguments = _distinct([[]] + [task.argument(draw) for _ in range(3 * NUM_CASES)])[: NUM_CASES + NUM_SHOWN]
        cases = [((argument,), names[name](_copy(argument))) for argument in arguments]
        if len({repr(value) for _, value in cases}) >= MIN_VALUES:
            break
    examples_shown, hidden = cases[:NUM_SHOWN], cases[NUM_SHOWN:]
    examples = "\n".join(f"{name}({argument!r}) returns {value!r}" for (argument,), value in examples_shown)
    prompt = f"Write a Python function {name}({task.parameter}) that {task.told}\n\n{examples}"
    return CodeProblem(name=f"level {level}", entry_point=name, prompt=prompt, solution=solution, cases=tuple(hidden))


def _choice(draw: np.random.Generator) -> _Task:
    (predicate, test), (fold, value) = _fill_entry(_pick(PREDICATES, draw), draw), _pick(FOLDS, draw)
    description = f"{LIST_TASK}, looks at those that are {predicate}, and returns {fold}."
    return _Task(description, "numbers", f"    chosen = [x for x in numbers if {test}]\n    return {value}\n", _numbers)


def _chain(draw: np.random.Generator) -> _Task:
    predicate, test = _fill_entry(_pick(PREDICATES, draw), draw)
    change, changed = _fill_entry(_pick(MAPS, draw), draw)
    fold, value = _pick(WIDE_FOLDS, draw)
    keep = f"    chosen = [x for x in chosen if {test}]\n"
    turn = f"    chosen = [{changed} for x in chosen]\n"
    if draw.integers(2):
        description, body = f"Those that are {predicate} are kept, and each of these is {change}", keep + turn
    else:
        description, body = f"Each is {change}, and those that are then {predicate} are kept", turn + keep
    description = f"{LIST_TASK}. {description}. It returns {fold}."
    return _Task(description, "numbers", f"    chosen = list(numbers)\n{body}    return {value}\n", _numbers)


def _scan(draw: np.random.Generator) -> _Task:
    if draw.integers(2):
        description, body, argument = draw_machine(draw)
        return _Task(description, "commands", body, argument)
    predicate, test = _fill_entry(_pick(PREDICATES, draw), draw)
    description, body = _pick(SCANS, draw)
    values = {"d": int(draw.integers(2, 8)), "w": int(draw.integers(2, 5)), "predicate": predicate, "test": test}
    return _Task(f"{LIST_TASK} and returns {description.format(**values)}.", "numbers", body.format(**values), _numbers)


LEVELS: dict[int, Callable[[np.random.Generator], _Task]] = {1: _choice, 2: _chain, 3: _scan}
"""Maps a level to the function that draws a task."""


def _fill_entry(entry: tuple[str, str], draw: np.random.Generator) -> tuple[str, str]:
    values = {"k": int(draw.integers(-9, 10)), "d": int(draw.integers(2, 10))}
    description, code = (part.format(**values) for part in entry)
    return description, code


def _numbers(draw: np.random.Generator) -> list[int]:
    size = int(draw.integers(1, LONGEST + 1))
    max_number = MOST if draw.integers(2) else 5  # small ones meet the bounds of a predicate often
    return [int(number) for number in draw.integers(-max_number, max_number + 1, size)]


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list({repr(value): value for value in values}.values())


def _copy(value: list[Any]) -> list[Any]:
    return list(value)


def _pick(choices: Sequence[Any], draw: np.random.Generator) -> Any:
    return choices[int(draw.integers(len(choices)))]
