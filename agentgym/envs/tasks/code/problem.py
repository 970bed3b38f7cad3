"""`CodeProblem`: a function to be written, and the tests that judge it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CodeProblem"]


@dataclass(frozen=True, kw_only=True)
class CodeProblem:
    """A function that is asked for. Hidden are the solution, and `cases` or `test`: one of the two judges.

    CodeProblem(name="double", entry_point="double", prompt="Write `double(x)` ...",
                solution="def double(x):\\n    return 2 * x\\n", cases=[((2,), 4), ((0,), 0)])
    """

    name: str
    entry_point: str
    """The name of the function."""
    prompt: str
    """The text that the player is shown."""
    solution: str
    """A complete program that is right."""
    cases: Sequence[tuple[tuple[Any, ...], Any]] = ()
    """The arguments, and the values that they must give: plain values."""
    test: str = ""
    """Code that defines `check(candidate)`, which raises if the function is wrong; it sees the solution's names."""
