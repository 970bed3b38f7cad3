"""Countdown-v0: reach a target with given numbers and the four operations."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError
from agentgym.tools import tool
from agentgym.tools.expression import ExpressionError, evaluate_expression
from agentgym.types import JSON, Message

__all__ = ["Countdown"]

LEVELS = {1: (2, 200, 0, 400), 2: (4, 10, 0, 200), 3: (4, 10, 2, 999)}
"""Maps a level to the count of small numbers, the largest of them, the count of large ones, the largest target."""
LARGE = (25, 50, 75, 100)
NUM_ANSWERS = 3
MAX_CHARS = 100


class Countdown(ToolEnv):
    """Reach a target with given numbers, each used at most once, by + - * / and parentheses. Reward 1 when reached.

    `level` (1 to 3) sets how many numbers there are: 2 (up to 200), 4 or 6. There are three answers; a wrong one, and
    one that cannot be read, uses one up.
    """

    card = EnvCard(
        task="Write an expression of the given numbers, each used at most once, that is the target.",
        tools=("answer",),
        reward="1 for an expression that is the target, else 0. A wrong or unreadable answer costs one of three.",
        difficulty=Difficulty(
            values={1: "two numbers up to 200", 2: "four up to 10", 3: "four up to 10, and two large ones"}
        ),
        oracle="writes the expression that the target was drawn from",
        cheat="answers the target itself, numbers that are not given or used twice, code, and claims",
        baseline={"random": 0.58},
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
        num_small, largest_small, num_large, largest = LEVELS[self.level]
        self.target = 0
        while not 1 < self.target <= largest or self.target in self.numbers:
            small = [int(number) for number in self.np_random.integers(1, largest_small + 1, num_small)]
            large = [int(number) for number in self.np_random.choice(LARGE, num_large, replace=False)]
            self.numbers = small + large
            self.solution = random_expression(self.numbers, self.np_random)
            value = evaluate_expression(self.solution, plain=True).value
            self.target = int(value) if value.denominator == 1 else 0
        self._num_left = NUM_ANSWERS
        return f"Numbers: {', '.join(map(str, self.numbers))}. Target: {self.target}. Answers left: {self._num_left}."

    @tool
    def answer(self, expression: str) -> str:
        """Answers with an expression.

        Args:
            expression: such as (a + b) * c, with the numbers
        """
        self._num_left -= 1
        verdict = self._judge_expression(expression)
        if self._over:
            return verdict
        if not self._num_left:
            self.end(success=False)
            return f"{verdict} No answers left."
        numbers = ", ".join(map(str, self.numbers))
        return f"{verdict} Numbers: {numbers}. Target: {self.target}. Answers left: {self._num_left}."

    def task_identity(self) -> JSON:
        """The numbers in any order, and the target."""
        return [sorted(self.numbers), self.target]

    def secrets(self) -> tuple[str, ...]:
        """The expression that the target was drawn from."""
        return (self.solution,)

    def make_oracle(self) -> Policy:
        """A policy that knows an expression."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but an expression of the numbers."""
        return Trickster("answer", _tricks)

    def make_random(self) -> Policy:
        """A policy that writes any expression of the numbers."""
        return _Random()

    def _judge_expression(self, expression: str) -> str:
        try:
            answered = evaluate_expression(expression, plain=True, max_chars=MAX_CHARS)
        except ExpressionError as error:
            return f"{error}."
        left = list(self.numbers)
        for number in map(int, answered.numbers):
            if number not in left:
                return f"{number} is not there{' once more' if number in self.numbers else ''}."
            left.remove(number)
        if answered.value == self.target:
            self.end(success=True, reward=1.0)
            return f"That is {answered.value}: the target is reached."
        return f"That is {answered.value}, not {self.target}."


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
        return tool_call_reply("answer", expression=self._game.solution)


class _Random(_Oracle):
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        super().reset(env, observation, seed)
        self._draw = np.random.default_rng(seed)

    def act(self, observation: str) -> Message:
        return tool_call_reply("answer", expression=random_expression(self._game.numbers, self._draw))


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
    return [tool_call_reply("answer", expression=text) for text in expressions]
