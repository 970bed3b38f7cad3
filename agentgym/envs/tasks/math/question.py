"""`MathQuestion`: a question, its answer in LaTeX, and the form that an answer to it has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentgym.errors import ConfigError

__all__ = ["MathQuestion", "boxed_answer", "in_form"]

LONGEST_ANSWER = 200
MARKS = str.maketrans({"$": "", "−": "-", "–": "-"})
PARTS = re.compile(r"(?<=\d)(?:\{,\}|\\[,;:! ]|~|\s)(?=\d{3}(?!\d))")
"""The separators of thousands, other than a comma."""
SPACES = re.compile(
    r"\\[,;:! ]|\\q?quad|\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![a-zA-Z])|\\approx.*|\s+|~"
)
UNIT = re.compile(r"\\(?:text|textrm|mbox)\{[^{}\d]{2,}\}$")
WORD = re.compile(r"\\(?:text|textbf|textrm|mathbf|mathrm|mbox)\{([^{}]*)\}")
NAME = r"[a-zA-Z](?:_(?:\w|\{[^{}=]*\}))?"
NAME_PREFIX = re.compile(rf"(?<![\w\\]){NAME}\s*(?:=|\\in(?![a-z]))")
SIDE = rf"{NAME}|[a-zA-Z]'?\([a-zA-Z]\)|x-y|[^xy]*"
"""The text that may equal a number: no equation in x and y, as a question has some of these."""
FRACTION = r"\\[cdt]?frac(?:\{[-+]?\d+\}|\d)(?:\{[-+]?\d+\}|\d)"
SMALL = rf"[-+]?(?:\d+/\d+|\d+(?:\.\d+)?|\.\d+|\d*{FRACTION})"
"""A number without commas: among several numbers their meaning is unclear, and to match them takes for ever."""
NUMBER = rf"(?:[-+]?\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|{SMALL})"
TIMES = r"(?:\\cdot|\\times|\*)"
ROOT = rf"(?:\d*{TIMES}?\\sqrt(?:\{{\d+\}}|\d)(?:{TIMES}\d+)?)"
SURD = rf"[-+]?(?:{ROOT}|\d+(?:/\d+)?)(?:[-+](?:{ROOT}|\d+(?:/\d+)?))?"
FORMS = {
    "number": rf"(?:{NUMBER}|\({NUMBER}\)|\\?\{{{NUMBER}\\?\}})",
    "surd": rf"(?:\(?{SURD}\)?(?:/\d+)?|[-+]?\d*{TIMES}?\({SURD}\)|[-+]?\\[dt]?frac\{{{SURD}\}}\{{\d+\}}|"
    rf"[-+]?(?:\d+|\\[dt]?frac\{{\d+\}}\{{\d+\}})[-+]\\[dt]?frac\{{{ROOT}\}}\{{\d+\}})",
    "polynomial": rf"(?:\d{{1,9}}+(?!\d)|x(?:\^(?:\d|\{{\d{{1,2}}\}}))?|[-+]|\((?=[^(]*\))|\)|{TIMES})+",
    "set": rf"(?:\\?\{{|\()?{SMALL}(?:(?:[,;]|,?(?:or|and)){SMALL})*(?:\\?\}}|\))?",
}
"""The pattern of an answer of each form, without spaces: worked out, so that a repeated question is no answer."""


@dataclass(frozen=True)
class MathQuestion:
    """A question with its answer: `MathQuestion("Solve 2x = 1.", r"\\frac{1}{2}", "number")`."""

    text: str
    answer: str
    form: str = "number"
    """One of `number`, `surd` (roots among the numbers), `polynomial` in x, `set` of numbers."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(f"a question's form is one of {', '.join(FORMS)}; got {self.form!r}")


def boxed_answer(reply: str) -> str | None:
    r"""The content of the last `\boxed{}` of a reply; None if there is none, or it is not closed.

    >>> boxed_answer(r"So \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, box, rest = reply.rpartition("\\boxed{")
    depth = 1
    for index, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth and box:
            return rest[:index]
    return None


def in_form(answer: str, form: str) -> str | None:
    r"""An answer in the notation of a form, without `$`, spaces and a unit; None if it is in another notation.

    The left sides of its equations (`x = `, `\gcd(4, 6) = `) do not count, nor does an approximation (`\approx`).

    >>> in_form(r"f(2) = 1\,250 \text{ in all}", "number"), in_form(r"x = \pm 3", "set")
    ('1250', '\\{-3, 3\\}')
    """
    if len(answer) > LONGEST_ANSWER:
        return None
    plain = SPACES.sub(" ", PARTS.sub("", answer.translate(MARKS))).strip().rstrip(".")
    plain = WORD.sub(r"\1", UNIT.sub("", plain) if form in ("number", "surd") else plain)
    if form == "set":
        plain = re.sub(rf"\\pm\s*({SMALL})", r"-\1,\1", NAME_PREFIX.sub("", plain))
    *sides, plain = plain.split("=")
    side = ".*" if form == "polynomial" else SIDE
    if not all(re.fullmatch(side, text.replace(" ", "")) for text in sides):
        return None
    fitting = re.fullmatch(FORMS[form], plain.replace(" ", ""))
    if fitting is None:
        return None
    return f"\\{{{', '.join(re.findall(SMALL, fitting[0]))}\\}}" if form == "set" else plain.strip()
