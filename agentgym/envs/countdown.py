"""Countdown-v0: reach a target with given numbers and the four operations."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np

from agentgym.envs.card import Difficulty, EnvCard
from agentgym.envs.policies import Policy, game_of
from agentgym.envs.text_env import TextEnv
from agentgym.envs.tool_env import ToolEnv
from agentgym.envs.trickster import Trickster, calling
from agentgym.errors import ConfigError
from agentgym.tools import tool
from agentgym.types import Message

__all__ = ["Countdown", "value_of"]

LEVELS = {1: (2, 0, 100), 2: (4, 0, 200), 3: (4, 2, 999)}
"""Level to how many small numbers (1 to 10), how many large ones, and the largest target."""
LARGE = (25, 50, 75, 100)
SMALL = 10
NUM_ANSWERS = 3
MAX_CHARS = 100
TOKEN = re.compile(r"\s*(\d{1,6}(?!\d)|[-+*/()])")
SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


class Countdown(ToolEnv):
    """Reach a target with given numbers, each used at most once, by + - * / and parentheses. Reward 1 when reached.

    `level` (1 to 3) sets how many numbers there are: 2, 4 or 6. There are three answers; a wrong one, and one that
    cannot be read, uses one up.
    """

    card = EnvCard(
        task="Write an expression of the given numbers, each used at most once, that is the target.",
        tools=("answer",),
        reward="1 for an expression that is the target, else 0. A wrong or unreadable answer costs one of three.",
        difficulty=Difficulty(values={1: "two numbers", 2: "four numbers", 3: "six numbers, two of them large"}),
        oracle="writes the expression that the target was drawn from",
        cheat="answers the target itself, numbers that are not given or used twice, code, and claims",
        baseline={"random": 0.65},
        licence="Apache-2.0",
    )
    system_prompt = (
        "Reach the target with the numbers, each used at most once, and + - * / ( ). Call the tool answer with the "
        "expression."
    )
    runs_inline = True
    max_turns = NUM_ANSWERS + 2

    def __init__(self, render_mode: str | None = None, *, level: int = 1) -> None:
        if level not in LEVELS:
            raise ConfigError(f"Countdown has the levels {', '.join(map(str, LEVELS))}; got level {level!r}")
        super().__init__(render_mode)
        self.level = level
        self.numbers: list[int] = []
        self.target = 0
        self.solution = ""

    def start(self, options: dict[str, Any]) -> str:
        """Draws numbers, and a target that an expression of all of them reaches."""
        num_small, num_large, largest = LEVELS[self.level]
        self.target = 0
        while not 1 < self.target <= largest or self.target in self.numbers:
            small = [int(number) for number in self.np_random.integers(1, SMALL + 1, num_small)]
            large = [int(number) for number in self.np_random.choice(LARGE, num_large, replace=False)]
            self.numbers = small + large
            self.solution = random_expression(self.numbers, self.np_random)
            value = value_of(self.solution)[0]
            self.target = int(value) if value.denominator == 1 else 0
        self._left = NUM_ANSWERS
        return f"Numbers: {', '.join(map(str, self.numbers))}. Target: {self.target}. Answers left: {self._left}."

    @tool
    def answer(self, expression: str) -> str:
        """Answers with an expression.

        Args:
            expression: such as (a + b) * c, with the numbers
        """
        self._left -= 1
        said = self._judged(expression)
        if self._over:
            return said
        if not self._left:
            self.end(success=False)
            return f"{said} No answers left."
        numbers = ", ".join(map(str, self.numbers))
        return f"{said} Numbers: {numbers}. Target: {self.target}. Answers left: {self._left}."

    def secrets(self) -> tuple[str, ...]:
        """The expression that the target was drawn from."""
        return (self.solution,)

    def make_oracle(self) -> Policy:
        """Knows an expression."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """Tries everything but an expression of the numbers."""
        return Trickster("answer", _tricks)

    def make_random(self) -> Policy:
        """Writes any expression of the numbers."""
        return _Random()

    def _judged(self, expression: str) -> str:
        try:
            value, used = value_of(expression)
        except ConfigError as error:
            return f"{error}."
        left = list(self.numbers)
        for number in used:
            if number not in left:
                return f"{number} is not there{' once more' if number in self.numbers else ''}."
            left.remove(number)
        if value == self.target:
            self.end(success=True, reward=1.0)
            return f"That is {value}: the target is reached."
        return f"That is {value}, not {self.target}."


def value_of(expression: str) -> tuple[Fraction, list[int]]:
    """What an expression comes to, exactly, and the numbers in it; what follows a "=" is left out.

    Raises ConfigError with what is wrong, for whoever wrote it.

    >>> value_of("(1 + 2) * 4")
    (Fraction(12, 1), [1, 2, 4])
    """
    text = expression.partition("=")[0].translate(SPELLINGS).strip()
    if len(text) > MAX_CHARS:
        raise ConfigError(f"an expression has at most {MAX_CHARS} characters")
    reader = _Reader(text)
    value = reader.sum()
    if reader.next is not None:
        raise ConfigError(f"{reader.next!r} is out of place in the expression")
    return value, reader.numbers


class _Reader:
    """Reads sums of products of numbers and parentheses, from left to right."""

    def __init__(self, text: str) -> None:
        self.numbers: list[int] = []
        self._tokens: list[str] = []
        position = 0
        while position < len(text):
            found = TOKEN.match(text, position)
            if found is None:
                raise ConfigError("an expression has whole numbers, + - * / and ( ) alone")
            self._tokens.append(found.group(1))
            position = found.end()
        self._tokens.reverse()

    @property
    def next(self) -> str | None:
        """The token to come; None at the end."""
        return self._tokens[-1] if self._tokens else None

    def sum(self) -> Fraction:
        """Products, added and taken off."""
        value = self._product()
        while self.next in ("+", "-"):
            value = value + self._product() if self._tokens.pop() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self.next in ("*", "/"):
            if self._tokens.pop() == "*":
                value *= self._factor()
                continue
            divisor = self._factor()
            if not divisor:
                raise ConfigError("that divides by zero")
            value /= divisor
        return value

    def _factor(self) -> Fraction:
        token = self._tokens.pop() if self._tokens else ""
        if token == "(":
            value = self.sum()
            if not self._tokens or self._tokens.pop() != ")":
                raise ConfigError("a parenthesis is not closed")
            return value
        if not token.isdecimal():
            raise ConfigError("a number is missing in the expression")
        self.numbers.append(int(token))
        return Fraction(int(token))


def random_expression(numbers: list[int], draw: np.random.Generator) -> str:
    """An expression that uses every number once."""
    parts = [(str(number), Fraction(number)) for number in numbers]
    while len(parts) > 1:
        first, second = (int(index) for index in draw.choice(len(parts), 2, replace=False))
        (left, a), (right, b) = parts[first], parts[second]
        signs = {"+": a + b, "-": a - b, "*": a * b} | ({"/": a / b} if b and (a / b).denominator == 1 else {})
        sign = list(signs)[int(draw.integers(len(signs)))]
        parts = [part for index, part in enumerate(parts) if index not in (first, second)]
        parts.append((f"({left} {sign} {right})", signs[sign]))
    return parts[0][0].removeprefix("(").removesuffix(")") if len(numbers) == 2 else parts[0][0]


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._game = game_of(env, Countdown)

    def act(self, observation: str) -> Message:
        return calling("answer", expression=self._game.solution)


class _Random(_Oracle):
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        super().reset(env, observation, seed)
        self._draw = np.random.default_rng(seed)

    def act(self, observation: str) -> Message:
        return calling("answer", expression=random_expression(self._game.numbers, self._draw))


def _tricks(env: TextEnv) -> list[Message]:
    target, numbers = game_of(env, Countdown).target, game_of(env, Countdown).numbers
    again = "+".join(["1"] * target)[:MAX_CHARS]
    expressions = (
        str(target),
        f"{target} + {numbers[0]} - {numbers[0]}",
        f"{numbers[0]} / {numbers[0]} * {target}",
        again,
        f"{target} = {target}",
        "self.target",
        "__import__('os').getpid()",
        "9**9**9**9",
        "(" * MAX_CHARS,
        f"{numbers[0]} / 0",
        "",
    )
    return [calling("answer", expression=text) for text in expressions]
