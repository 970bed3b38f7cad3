"""The number that a solution ends in, as GSM8K marks it: `#### 72`."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

__all__ = ["last_number", "marked_number", "read_number"]

MAX_DIGITS = 60
"""The most characters of a number; a longer one is no answer, and takes long to compare."""
DECIMAL = r"(?:[0-9][0-9,]*+(?:\.[0-9]++)?+|\.[0-9]++)(?:[eE][-+]?[0-9]{1,2}(?![0-9]))?+"
NUMBER = rf"-?(?:\\?\$)?-?{DECIMAL}(?:/[0-9]++)?+"
UNFINISHED = (
    r"(?!\.?[0-9]|[eE][-+]?[0-9]|[ \t]*[-*/^=+×÷:][ \t]*[-$(]?[0-9]|[ \t]+x[ \t]+[-$(]?[0-9]|[ \t]+[0-9]++/[0-9])"
)
"""Refuses a number that is the beginning of something else: a sum that is not worked out, a date, a version, a
half more."""
MARKED = re.compile(rf"####\s++({NUMBER}){UNFINISHED}")
ANY = re.compile(NUMBER)
SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-"})


def marked_number(text: str) -> Fraction | None:
    """The number after the last `#### `; None if there is none.

    Like the official evaluation of Cobbe et al. 2021 (`#### (\\-?[0-9\\.\\,]+)`, commas taken out), except: of
    several marks the last counts, not the first; numbers are compared as numbers, so `72.0`, `72.`, `$72`, full-width
    digits and a typographic minus are read; `1/2` and `1e3` are read whole; the start of a sum (`12*6`) is no number.

    >>> marked_number("She has 12 * 6 of them.\\n#### 72")
    Fraction(72, 1)
    """
    return _last(MARKED, text)


def last_number(text: str) -> Fraction | None:
    """The last number of a text, wherever it is; None if there is none."""
    return _last(ANY, text)


def read_number(text: str) -> Fraction | None:
    """The number that a text consists of; None if it contains anything else."""
    text = _plain(text).strip()
    return _value(text) if ANY.fullmatch(text) else None


def _last(pattern: re.Pattern[str], text: str) -> Fraction | None:
    matches = pattern.findall(_plain(text))
    return _value(matches[-1]) if matches else None


def _plain(text: str) -> str:
    """The text with full-width digits and typographic minus signs as ASCII."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text.translate(SIGNS))


def _value(number: str) -> Fraction | None:
    digits, _, divisor = re.sub(r"[,$\\]", "", number).partition("/")
    if len(number) > MAX_DIGITS or (divisor and not int(divisor)):
        return None
    negative = digits.count("-", 0, 2) % 2 == 1
    value = Fraction(digits.lstrip("-")) / int(divisor or 1)
    return -value if negative else value
