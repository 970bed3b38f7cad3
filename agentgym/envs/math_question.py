"""`MathQuestion`: a question, its answer in LaTeX, and the form that an answer to it has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentgym.errors import ConfigError

__all__ = ["MathQuestion", "boxed", "in_form"]

LONGEST_ANSWER = 200
SPACES = re.compile(r"\\[,;:! ]|\\q?quad|\\left(?![a-z])|\\right(?![a-z])|\s+|~")
NAMED = re.compile(r"^[a-zA-Z](?:\([a-zA-Z]\)|'\([a-zA-Z]\)|\\in|_\{?\d\}?)?(?:=|(?<=in))")
PARTED = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?"
SMALL = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+|\\[dt]?frac\{[-+]?\d+\}\{\d+\}|\\[dt]?frac\d\d|\d+/\d+)"
"""A number without commas: among several it would not be clear what they part, and take for ever to find out."""
NUMBER = rf"(?:[-+]?{PARTED}|{SMALL})"
ROOT = r"(?:\d*(?:\\cdot|\*)?\\sqrt(?:\{\d+\}|\d))"
SURD = rf"[-+]?(?:{ROOT}|\d+(?:/\d+)?)(?:[-+](?:{ROOT}|\d+(?:/\d+)?))?"
FORMS = {
    "number": NUMBER,
    "surd": rf"(?:\(?{SURD}\)?(?:/\d+)?|[-+]?\\[dt]?frac\{{{SURD}\}}\{{\d+\}}|"
    rf"[-+]?(?:\d+|\\[dt]?frac\{{\d+\}}\{{\d+\}})[-+]\\[dt]?frac\{{{ROOT}\}}\{{\d+\}})",
    "polynomial": r"(?:\d{1,9}+(?!\d)|x(?:\^(?:\d|\{\d{1,2}\}))?|[-+*]|\((?=[^(]*\))|\)|\\cdot)+",
    "set": rf"(?:\\?\{{|\()?{SMALL}(?:(?:,|or|and|\\text\{{or\}}|\\text\{{and\}}|,x=){SMALL})*(?:\\?\}}|\))?",
}
"""What an answer of a form looks like, without spaces: worked out, so that the question given back is no answer."""


@dataclass(frozen=True)
class MathQuestion:
    """Such as `MathQuestion("Solve 2x = 1.", r"\\frac{1}{2}", "number")`."""

    text: str
    answer: str
    form: str = "number"
    """One of `number`, `surd` (roots among the numbers), `polynomial` in x, `set` of numbers."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(f"a question's form is one of {', '.join(FORMS)}; got {self.form!r}")


def boxed(reply: str) -> str | None:
    r"""What stands in the last `\boxed{}` of a reply; None where there is none, or it is not closed.

    >>> boxed(r"So \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, found, rest = reply.rpartition("\\boxed{")
    depth = 1
    for place, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth and found:
            return rest[:place]
    return None


def in_form(answer: str, form: str) -> str | None:
    """An answer that is written as those of a form are, without `$`, spaces of LaTeX and a full stop; else None.

    A name before it (`x =`) does not count.
    """
    if len(answer) > LONGEST_ANSWER:
        return None
    plain = SPACES.sub(" ", answer.replace("$", "").replace("−", "-")).strip().rstrip(".")
    fits = re.fullmatch(FORMS[form], NAMED.sub("", plain.replace(" ", "")))
    return None if fits is None else plain
