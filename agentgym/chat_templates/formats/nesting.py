"""Matches the marks of a text: a call's opening, its arguments' closings, and its closing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["element_marks", "elements", "value_ends"]


def elements(call: tuple[str, str], value: tuple[str, str], verbatim: str = "") -> re.Pattern[str]:
    """Returns the pattern of any opening or closing of a call or a value; `verbatim` matches what hides marks."""
    kinds = {"call": call[0], "end_call": call[1], "value": value[0], "end_value": value[1]}
    marks = [f"(?P<{kind}>{re.escape(mark)})" for kind, mark in kinds.items()]
    return re.compile("|".join([f"(?P<verbatim>{verbatim})", *marks] if verbatim else marks), re.DOTALL)


def element_marks(text: str, start: int, marks: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yields the marks from `start` on."""
    return (mark for mark in marks.finditer(text, start) if mark.lastgroup != "verbatim")


def value_ends(text: str, start: int, marks: re.Pattern[str]) -> Mapping[int, Sequence[int]]:
    """Returns, for each call whose elements all close, its start and the starts of its arguments' closings.

    A call inside an argument's value, such as an example that the model quotes, is separate and hides nothing of the
    call around it. A call whose marks do not match is left out.
    """
    ends_by_start: dict[int, Sequence[int]] = {}
    stack: list[tuple[int, list[int] | None]] = []  # calls with their arguments' ends, and values, which have none
    for mark in element_marks(text, start, marks):
        kind = mark.lastgroup
        if kind == "call":
            if stack and stack[-1][1] is not None:  # a call in a call, but in none of its values: that one never ends
                stack.pop()
            stack.append((mark.start(), []))
        elif kind == "value" and stack:
            stack.append((mark.start(), None))
        elif kind == "end_value" and stack:
            _close_value(stack, mark.start())
        elif kind == "end_call":
            _close_call(stack, ends_by_start)
    return ends_by_start


def _close_value(stack: list[tuple[int, list[int] | None]], index: int) -> None:
    if len(stack) > 1 and stack[-1][1] is not None:  # what looked like a call in the value was only text
        stack.pop()
    _, ends = stack[-1]
    if ends is not None:  # nothing is open: the marks of the call do not match
        ends.append(UNOPENED)
        return
    stack.pop()
    around = stack[-1][1]
    if around is not None:
        around.append(index)


def _close_call(stack: list[tuple[int, list[int] | None]], ends_by_start: dict[int, Sequence[int]]) -> None:
    fits = True
    while stack:
        start, ends = stack.pop()
        if ends is not None:
            if fits and UNOPENED not in ends:
                ends_by_start[start] = ends
            return
        fits = False


UNOPENED = -1
