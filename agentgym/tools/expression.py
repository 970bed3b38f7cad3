"""Evaluates untrusted arithmetic: exactly, and bounded in time and in size."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

from agentgym.errors import AgentGymError

__all__ = ["Evaluated", "ExpressionError", "evaluate_expression", "format_value"]

MAX_CHARS = 1000
MAX_DEPTH = 128
"""The deepest nesting of operations and parentheses; a chain of powers counts."""
MAX_BITS = 4096
"""The longest numerator or denominator in bits: about 1,200 digits."""
MAX_EXPONENT_DIGITS = 4
SHOWN_DIGITS = 40
ROUNDED_DIGITS = 12
APPROXIMATE = Context(prec=50)

NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])|[0-9]+)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
TOKEN = re.compile(rf"\s*({NUMBER}|\*\*|//|[-+*/%^()]|[a-z]+)\s*")
PLAIN_TOKEN = re.compile(r"\s*([0-9]{1,6}(?![0-9])|[-+*/()])\s*")
SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
SUM, PRODUCT, POWER = 1, 2, 3
BINDS = {"+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT, "//": PRODUCT, "%": PRODUCT, "**": POWER, "^": POWER}
FUNCTIONS = ("abs", "ceil", "floor", "round", "sqrt")


class ExpressionError(AgentGymError, ValueError):
    """The text is not an expression, or has no value; the message is for its author."""


@dataclass(frozen=True)
class Evaluated:
    """The result of an expression: that of "(1 + 2) * 4" is `Evaluated(Fraction(12), (1, 2, 4), True)`."""

    value: Fraction
    numbers: tuple[Fraction, ...]
    """The numbers in the expression, from left to right."""
    is_exact: bool
    """False if a root without an exact fraction was taken; `value` is then accurate to 50 digits."""


def evaluate_expression(text: str, *, plain: bool = False, max_chars: int = MAX_CHARS) -> Evaluated:
    """Evaluates an expression, without anything after a "=". Raises ExpressionError.

    + - * / // % ^ (also **) and parentheses bind as in Python. Numbers are decimal, with optional commas between
    thousands and an optional exponent (`1e3`). `15%` is 0.15 if no number follows. Functions: abs, ceil, floor, round
    (halves away from zero), sqrt. `plain` allows only whole numbers, + - * / and parentheses.
    """
    if len(text) > max_chars:
        raise ExpressionError(f"an expression has at most {max_chars} characters")
    reader = _Reader(text.partition("=")[0].translate(SPELLINGS).strip(), plain)
    value = reader.operation()
    if reader.next is not None:
        raise ExpressionError(f"{reader.next!r} is out of place in the expression")
    return Evaluated(value, tuple(reader.numbers), reader.is_exact)


def format_value(result: Evaluated) -> str:
    """Returns the value as text: all digits if they end soon, otherwise rounded and marked with "about".

    >>> format_value(evaluate_expression("1 / 8")), format_value(evaluate_expression("2 / 3"))
    ('0.125', 'about 0.666666666667 (exactly 2/3)')
    """
    value, decimals = result.value, _decimal_places(result.value)
    if result.is_exact and decimals is not None and abs(value) < 10**SHOWN_DIGITS:
        digits = f"{abs(value.numerator) * 10**decimals // value.denominator:0{decimals + 1}d}"
        whole = f"{digits[:-decimals]}.{digits[-decimals:]}" if decimals else digits
        return f"-{whole}" if value < 0 else whole
    rounded = Context(prec=ROUNDED_DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator)).normalize()
    near = -SHOWN_DIGITS < rounded.adjusted() < SHOWN_DIGITS
    fraction = f" (exactly {value})" if result.is_exact and len(str(value)) <= ROUNDED_DIGITS else ""
    return f"about {rounded:{'f' if near else 'e'}}{fraction}"


def _decimal_places(value: Fraction) -> int | None:
    """Returns the number of decimals of the value, or None if they do not end, or not soon."""
    return next((n for n in range(SHOWN_DIGITS // 2) if 10**n % value.denominator == 0), None)


class _Reader:
    """Reads operations from left to right, by the precedence of their operators."""

    def __init__(self, text: str, plain: bool) -> None:
        self.numbers: list[Fraction] = []
        self.is_exact = True
        self._plain = plain
        self._depth = 0
        self._tokens: list[str] = []
        token, position = PLAIN_TOKEN if plain else TOKEN, 0
        while position < len(text):
            match = token.match(text, position)
            if match is None:
                allowed = "whole numbers, + - * /" if plain else "numbers, + - * / // % ^"
                raise ExpressionError(
                    f"an expression has {allowed} and ( ) alone, not {text[position : position + 10]!r}"
                )
            self._tokens.append(match.group(1))
            position = match.end()
        self._tokens.reverse()

    @property
    def next(self) -> str | None:
        """The next token, or None at the end."""
        return self._tokens[-1] if self._tokens else None

    def operation(self, binds: int = SUM) -> Fraction:
        """Reads an operand and the operators after it that bind at least as tightly as `binds`; returns the value."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"an expression is nested at most {MAX_DEPTH} deep")
        value = self._operand()
        while (sign := self.next) in BINDS:
            if sign == "%" and not self._begins_operand(self._tokens[-2:-1]):
                self._tokens.pop()
                value = _check_size(value / 100)
                continue
            if BINDS[sign] < binds:
                break
            self._tokens.pop()
            right = self.operation(BINDS[sign] if BINDS[sign] == POWER else BINDS[sign] + 1)
            value = _check_size(
                self._power(value, right) if BINDS[sign] == POWER else _apply_operator(sign, value, right)
            )
        self._depth -= 1
        return value

    def _operand(self) -> Fraction:
        token = self._tokens.pop() if self._tokens else ""
        if token == "(":
            return self._read_parenthesis()
        if token in ("-", "+") and not self._plain:
            value = self.operation(POWER)
            return -value if token == "-" else value
        if token in FUNCTIONS and self.next == "(":
            self._tokens.pop()
            return self._call_function(token, self._read_parenthesis())
        if token.isalpha():
            raise ExpressionError(f"{token!r} is not known here; there are {', '.join(FUNCTIONS)}, with a parenthesis")
        if not token[:1].isdecimal() and not (token.startswith(".") and len(token) > 1):
            raise ExpressionError("a number is missing in the expression")
        self.numbers.append(_number(token))
        return self.numbers[-1]

    def _read_parenthesis(self) -> Fraction:
        value = self.operation()
        if not self._tokens or self._tokens.pop() != ")":
            raise ExpressionError("a parenthesis is not closed")
        return value

    def _call_function(self, name: str, value: Fraction) -> Fraction:
        if name == "sqrt":
            return self._power(value, Fraction(1, 2))
        if name == "round":
            return Fraction(math.floor(abs(value) + Fraction(1, 2)) * (1 if value > 0 else -1))
        if name == "abs":
            return abs(value)
        return Fraction(math.ceil(value) if name == "ceil" else math.floor(value))

    def _power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if not base and exponent < 0:
            raise ExpressionError("that divides by zero")
        if base < 0 and exponent.denominator != 1:
            raise ExpressionError("a root of a negative number has no value here")
        if not exponent or abs(base) in (0, 1):
            return base if exponent % 2 or (exponent and base >= 0) else Fraction(1)
        if abs(exponent) * _num_bits(base) > MAX_BITS:
            raise ExpressionError("the power is too large to work out")
        if exponent.denominator == 1:
            return base ** int(exponent)
        if exponent.denominator == 2:
            root = Fraction(math.isqrt(base.numerator), math.isqrt(base.denominator))
            if root * root == base:
                return root**exponent.numerator
        self.is_exact = False
        near = [APPROXIMATE.divide(Decimal(part.numerator), Decimal(part.denominator)) for part in (base, exponent)]
        return Fraction(APPROXIMATE.power(*near))

    def _begins_operand(self, tokens: list[str]) -> bool:
        return bool(tokens) and (tokens[0] == "(" or tokens[0][0].isalnum() or tokens[0].startswith("."))


def _apply_operator(sign: str, left: Fraction, right: Fraction) -> Fraction:
    if not right and sign in ("/", "//", "%"):
        raise ExpressionError("that divides by zero")
    return Fraction(OPERATIONS[sign](left, right))


OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def _number(token: str) -> Fraction:
    digits, _, exponent = token.lower().replace(",", "").partition("e")
    if len(exponent.lstrip("+-")) > MAX_EXPONENT_DIGITS or len(digits) > MAX_BITS // 4:
        raise ExpressionError(f"the number {token[:20]!r} is too long")
    return _check_size(Fraction(digits) * Fraction(10) ** int(exponent or 0))


def _num_bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _check_size(value: Fraction) -> Fraction:
    if _num_bits(value) > MAX_BITS:
        raise ExpressionError(f"numbers of more than {int(MAX_BITS * math.log10(2))} digits are not worked out")
    return value
