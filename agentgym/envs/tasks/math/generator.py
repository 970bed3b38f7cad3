"""Draws questions of algebra, number theory and calculus whose answers are known by construction, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from agentgym.envs.tasks.math.question import MathQuestion

__all__ = ["KINDS", "draw_question"]

Draw: TypeAlias = np.random.Generator
Kind: TypeAlias = Callable[[Draw], MathQuestion]


def draw_question(level: int, draw: Draw) -> MathQuestion:
    """A question of a level."""
    kinds = KINDS[level]
    return kinds[int(draw.integers(len(kinds)))](draw)


# ---- level 1


def _linear(draw: Draw) -> MathQuestion:
    a, b, c = _other_than_0(draw, 12), _whole(draw, -20, 20), _whole(draw, -20, 20)
    if (a, b) == (1, 0):  # solved already
        return _linear(draw)
    return MathQuestion(f"Solve ${_polynomial([b, a])} = {c}$ for $x$.", _latex(Fraction(c - b, a)))


def _divisor(draw: Draw) -> MathQuestion:
    factor, a, b = _whole(draw, 2, 24), _whole(draw, 2, 30), _whole(draw, 2, 30)
    a, b = factor * a, factor * b
    return MathQuestion(f"What is the greatest common divisor of {a} and {b}?", str(math.gcd(a, b)))


def _multiple(draw: Draw) -> MathQuestion:
    a, b = _whole(draw, 4, 60), _whole(draw, 4, 60)
    return MathQuestion(f"What is the least common multiple of {a} and {b}?", str(math.lcm(a, b)))


def _fractions(draw: Draw) -> MathQuestion:
    a, b = (Fraction(_whole(draw, 1, 12), _whole(draw, 2, 13)) for _ in range(2))
    sign = "+-"[int(draw.integers(2))]
    return MathQuestion(f"Calculate ${_latex(a)} {sign} {_latex(b)}$.", _latex(a + b if sign == "+" else a - b))


def _value(draw: Draw) -> MathQuestion:
    coefficients, x = [_whole(draw, -9, 9), _whole(draw, -9, 9), _other_than_0(draw, 6)], _whole(draw, -6, 6)
    value = sum(factor * x**power for power, factor in enumerate(coefficients))
    return MathQuestion(f"What is $f({x})$ where $f(x) = {_polynomial(coefficients)}$?", str(value))


def _remainder(draw: Draw) -> MathQuestion:
    a, b, m = _whole(draw, 20, 400), _whole(draw, 20, 400), _whole(draw, 5, 40)
    return MathQuestion(f"What is the remainder when ${a} \\cdot {b}$ is divided by {m}?", str(a * b % m))


# ---- level 2


def _roots(draw: Draw) -> MathQuestion:
    p, q = _whole(draw, -12, 12), _whole(draw, -12, 12)
    while p == q:
        q = _whole(draw, -12, 12)
    a = _whole(draw, 1, 4)
    text = f"What are the solutions of ${_polynomial([a * p * q, -a * (p + q), a])} = 0$? Give them as a set."
    return MathQuestion(text, f"\\{{{min(p, q)}, {max(p, q)}\\}}", "set")


def _surd(draw: Draw) -> MathQuestion:
    p, r = _whole(draw, -9, 9), [2, 3, 5, 6, 7, 10, 11, 13][int(draw.integers(8))]
    s = _whole(draw, 1, 4)
    root = f"{p} + {s if s > 1 else ''}\\sqrt{{{r}}}" if p else f"{s if s > 1 else ''}\\sqrt{{{r}}}"
    text = f"What is the larger solution of ${_polynomial([p * p - s * s * r, -2 * p, 1])} = 0$? Give it exactly."
    return MathQuestion(text, root, "surd")


def _series(draw: Draw) -> MathQuestion:
    first, step, number = _whole(draw, -20, 20), _other_than_0(draw, 9), _whole(draw, 8, 60)
    text = f"An arithmetic sequence begins with {first}, {first + step}, {first + 2 * step}. "
    total = number * (2 * first + (number - 1) * step) // 2
    return MathQuestion(f"{text}What is the sum of its first {number} terms?", str(total))


def _choose(draw: Draw) -> MathQuestion:
    n = _whole(draw, 6, 14)
    k = _whole(draw, 2, n - 2)
    return MathQuestion(f"In how many ways can {k} of {n} people be chosen?", str(math.comb(n, k)))


def _divisors(draw: Draw) -> MathQuestion:
    number = 2 ** _whole(draw, 0, 5) * 3 ** _whole(draw, 0, 3) * [5, 7, 11, 25, 35, 49][int(draw.integers(6))]
    count = sum(number % divisor == 0 for divisor in range(1, number + 1))
    return MathQuestion(f"How many positive divisors does {number} have?", str(count))


def _system(draw: Draw) -> MathQuestion:
    x, y = (Fraction(_whole(draw, -9, 9)) for _ in range(2))
    a, b, c, d = (_other_than_0(draw, 9) for _ in range(4))
    while a * d == b * c:
        d = _other_than_0(draw, 9)
    if (1, -1) in ((a, b), (c, d)):  # answered already
        return _system(draw)
    first = f"{_term(a, 'x')}{_term(b, 'y', sign=True)} = {a * x + b * y}"
    second = f"{_term(c, 'x')}{_term(d, 'y', sign=True)} = {c * x + d * y}"
    return MathQuestion(f"If ${first}$ and ${second}$, what is $x - y$?", _latex(x - y))


# ---- level 3


def _derivative(draw: Draw) -> MathQuestion:
    coefficients = [_whole(draw, -9, 9) for _ in range(_whole(draw, 3, 5))] + [_other_than_0(draw, 9)]
    slopes = [power * factor for power, factor in enumerate(coefficients)][1:]
    text = f"What is the derivative of $f(x) = {_polynomial(coefficients)}$?"
    return MathQuestion(text, _polynomial(slopes), "polynomial")


def _integral(draw: Draw) -> MathQuestion:
    coefficients = [_whole(draw, -6, 6), _whole(draw, -6, 6), _other_than_0(draw, 6)]
    low = _whole(draw, -3, 2)
    high = low + _whole(draw, 1, 3)
    area = sum(
        (Fraction(factor, power + 1) * (high ** (power + 1) - low ** (power + 1)))
        for power, factor in enumerate(coefficients)
    )
    return MathQuestion(f"Calculate $\\int_{{{low}}}^{{{high}}} ({_polynomial(coefficients)}) \\, dx$.", _latex(area))


def _power(draw: Draw) -> MathQuestion:
    a, n, m = _whole(draw, 2, 20), _whole(draw, 30, 400), _whole(draw, 7, 60)
    return MathQuestion(f"What is the remainder when ${a}^{{{n}}}$ is divided by {m}?", str(pow(a, n, m)))


def _chinese(draw: Draw) -> MathQuestion:
    primes = [int(prime) for prime in draw.permutation([5, 7, 9, 11, 13, 16])[:2]]
    number = _whole(draw, 1, math.prod(primes) - 1)
    rests = " and ".join(f"leaves the remainder {number % prime} when divided by {prime}" for prime in primes)
    return MathQuestion(f"What is the smallest positive whole number that {rests}?", str(number))


def _geometric(draw: Draw) -> MathQuestion:
    first, ratio = _other_than_0(draw, 9), Fraction(_other_than_0(draw, 5), _whole(draw, 6, 9))
    text = f"What is the sum of the infinite geometric series with first term {first} and ratio ${_latex(ratio)}$?"
    return MathQuestion(text, _latex(first / (1 - ratio)))


def _determinant(draw: Draw) -> MathQuestion:
    a, b, c, d, e, f, g, h, i = (_whole(draw, -5, 5) for _ in range(9))
    rows = f"{a} & {b} & {c} \\\\ {d} & {e} & {f} \\\\ {g} & {h} & {i}"
    value = a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
    return MathQuestion(f"What is the determinant of $\\begin{{pmatrix}} {rows} \\end{{pmatrix}}$?", str(value))


def _vieta(draw: Draw) -> MathQuestion:
    a, b, c = _whole(draw, 1, 5), _whole(draw, -9, 9), _other_than_0(draw, 9)
    total, product = Fraction(-b, a), Fraction(c, a)
    text = f"The complex solutions of ${_polynomial([c, b, a])} = 0$ are $u$ and $v$. What is $u^2 + v^2$?"
    return MathQuestion(text, _latex(total * total - 2 * product))


KINDS: dict[int, tuple[Kind, ...]] = {
    1: (_linear, _divisor, _multiple, _fractions, _value, _remainder),
    2: (_roots, _surd, _series, _choose, _divisors, _system),
    3: (_derivative, _integral, _power, _chinese, _geometric, _determinant, _vieta),
}
"""Maps a level to the functions that draw its questions."""


def _whole(draw: Draw, low: int, high: int) -> int:
    return int(draw.integers(low, high + 1))


def _other_than_0(draw: Draw, max_number: int) -> int:
    return _whole(draw, 1, max_number) * (1 if draw.integers(2) else -1)


def _latex(number: Fraction | int) -> str:
    """A number as LaTeX: `-\\frac{1}{2}`."""
    number = Fraction(number)
    if number.denominator == 1:
        return str(number.numerator)
    return f"{'-' if number < 0 else ''}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


def _polynomial(coefficients: Sequence[int]) -> str:
    """A polynomial in x from its coefficients, the constant first: `3x^2 - x + 5`."""
    parts = ""
    for power in range(len(coefficients) - 1, -1, -1):
        if coefficients[power]:
            name = {0: "", 1: "x"}.get(power, f"x^{power}")
            parts += _term(coefficients[power], name, sign=bool(parts))
    return parts or "0"


def _term(factor: int, name: str, *, sign: bool = False) -> str:
    """A term; with `sign` one that follows another."""
    size = "" if abs(factor) == 1 and name else str(abs(factor))
    before = (" - " if factor < 0 else " + ") if sign else ("-" if factor < 0 else "")
    return f"{before}{size}{name}"
