"""Draws a small machine: commands with made-up names, to be interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["draw_machine"]

WORDS = ("bip", "dor", "fen", "gal", "hux", "kip", "lom", "nar", "pel", "rix", "sul", "tav")
NUM_COMMANDS = 4
LONGEST = 9
OPERATIONS = (
    ("adds {a} to the value", "value += {a}"),
    ("takes {a} off the value", "value -= {a}"),
    ("multiplies the value by {b}", "value *= {b}"),
    ("changes the sign of the value", "value = -value"),
    ("divides the value by {b}, rounding down", "value //= {b}"),
    ("puts the value back to where it began", "value = {start}"),
    ("keeps a copy of the value in the store, in place of what was there", "store = value"),
    ("adds the store (0 at the beginning) to the value", "value += store"),
    ("exchanges the value and the store (0 at the beginning)", "value, store = store, value"),
)


def draw_machine(draw: np.random.Generator) -> tuple[str, str, Callable[[np.random.Generator], list[str]]]:
    """A machine in words, the body of its interpreter, and the function that draws a list of commands for it."""
    start = int(draw.integers(0, 6))
    words = [WORDS[int(index)] for index in draw.choice(len(WORDS), NUM_COMMANDS, replace=False)]
    chosen = [OPERATIONS[int(index)] for index in draw.choice(len(OPERATIONS), NUM_COMMANDS, replace=False)]
    values = [{"a": int(draw.integers(1, 10)), "b": int(draw.integers(2, 4)), "start": start} for _ in words]
    descriptions = [
        f"- {word!r} {text.format(**numbers)}" for word, (text, _), numbers in zip(words, chosen, values, strict=True)
    ]
    lines = [f"    value, store = {start}, 0", "    for command in commands:"]
    for word, (_, code), numbers in zip(words, chosen, values, strict=True):
        lines += [f"        if command == {word!r}:", f"            {code.format(**numbers)}"]
    sentence = (
        f"takes a list of commands and returns the value after them. The value begins at {start}; "
        "any other command does nothing.\n" + "\n".join(descriptions)
    )
    return sentence, "\n".join([*lines, "    return value\n"]), _commands([*words, _stranger(words)])


def _stranger(words: Sequence[str]) -> str:
    return next(word for word in WORDS if word not in words)


def _commands(words: Sequence[str]) -> Callable[[np.random.Generator], Any]:
    def argument(draw: np.random.Generator) -> list[str]:
        size = int(draw.integers(1, LONGEST + 1))
        return [words[int(index)] for index in draw.integers(0, len(words), size)]

    return argument
