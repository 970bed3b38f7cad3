"""Mastermind-v0: find a code of digits from the number of digits that are right and in place."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import numpy as np

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError
from agentgym.tools import tool
from agentgym.types import JSON, Message

__all__ = ["Mastermind", "marks"]

LEVELS = {1: (2, 4, 5), 2: (4, 6, 8), 3: (5, 6, 10)}
"""Maps a level to the length of a code, the number of digits to choose from, and the guesses."""


class Mastermind(ToolEnv):
    """A code of digits hides; each guess is told how many are in place and how many elsewhere. Reward 1 when found.

    `level` (1 to 3) sets the code: two digits out of four, four out of six, or five out of six. Which digits these are
    is drawn as well, and told. A digit may occur more than once. What is no code uses a guess up as well.
    """

    card = EnvCard(
        task="Find a hidden code of digits; each guess is told how many digits are in place and how many elsewhere.",
        tools=("guess",),
        reward="1 when the code is guessed, else 0. A wrong guess, and what is no code, costs one of the guesses.",
        difficulty=Difficulty(
            values={
                1: "two digits out of four, five guesses",
                2: "four digits out of six, eight guesses",
                3: "five digits out of six, ten guesses",
            }
        ),
        oracle="guesses a code that fits all it was told, and at its last guess knows the code",
        cheat="guesses all codes in one argument, patterns and numbers, and claims",
        baseline={"random": 0.26},
        licence="Apache-2.0",
    )
    system_prompt = "Find the hidden code. Call the tool guess with a code, one in each reply."
    runs_inline = True

    def __init__(self, render_mode: str | None = None, *, level: int = 1) -> None:
        if level not in LEVELS:
            raise ConfigError(f"Mastermind has the levels {', '.join(map(str, LEVELS))}; got level {level!r}")
        super().__init__(render_mode)
        self.level = level
        self.length, self.num_digits, self.num_guesses = LEVELS[level]
        self.max_turns = self.num_guesses + 2
        self.digits = self.code = ""
        self.left = 0

    def start(self, options: dict[str, Any]) -> str:
        """Draws the digits, and the code of them."""
        drawn = self.np_random.choice(10, self.num_digits, replace=False)
        self.digits = "".join(map(str, sorted(map(int, drawn))))
        chosen = self.np_random.integers(self.num_digits, size=self.length)
        self.code = "".join(self.digits[int(index)] for index in chosen)
        self.left = self.num_guesses
        return f"{self._form()} You have {self.left} guesses."

    @tool
    def guess(self, code: str) -> str:
        """Guesses the code.

        Args:
            code: its digits, without spaces
        """
        self.left -= 1
        if re.fullmatch(f"[{self.digits}]{{{self.length}}}", code) is None:
            verdict = self._form()
        elif code == self.code:
            self.end(success=True, reward=1.0)
            return f"{code} is the code."
        else:
            in_place, elsewhere = marks(code, self.code)
            verdict = f"{code}: {in_place} in place, {elsewhere} elsewhere."
        if not self.left:
            self.end(success=False)
            return f"{verdict} No guesses left. The code was {self.code}."
        return f"{verdict} Guesses left: {self.left}."

    def task_identity(self) -> JSON:
        """The digits, and the code."""
        return [self.digits, self.code]

    def secrets(self) -> tuple[str, ...]:
        """The code."""
        return (self.code,)

    def _form(self) -> str:
        others = ", ".join(self.digits[:-1])
        return f"The code has {self.length} digits, each of them {others} or {self.digits[-1]}."

    def make_oracle(self) -> Policy:
        """A policy that narrows the codes down."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but a code."""
        return Trickster("guess", _tricks)

    def make_random(self) -> Policy:
        """A policy that guesses any code."""
        return _Random()


def marks(guess: str, code: str) -> tuple[int, int]:
    """The number of digits of a guess that are in place, and of those that are elsewhere in the code.

    >>> marks("1123", "1214")
    (1, 2)
    """
    in_place = sum(left == right for left, right in zip(guess, code, strict=True))
    return in_place, (Counter(guess) & Counter(code)).total() - in_place


class _Random:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._game = game_of(env, Mastermind)
        self._draw = np.random.default_rng(seed)

    def act(self, observation: str) -> Message:
        drawn = self._draw.integers(self._game.num_digits, size=self._game.length)
        return tool_call_reply("guess", code="".join(self._game.digits[int(index)] for index in drawn))


class _Oracle(_Random):
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        super().reset(env, observation, seed)
        self._codes = ["".join(code) for code in itertools.product(self._game.digits, repeat=self._game.length)]

    def act(self, observation: str) -> Message:
        if match := re.match(r"(\d+): (\d+) in place, (\d+) elsewhere", observation):
            guess, marked = match.group(1), (int(match.group(2)), int(match.group(3)))
            self._codes = [code for code in self._codes if code != guess and marks(guess, code) == marked]
        code = self._game.code if self._game.left == 1 else self._codes[int(self._draw.integers(len(self._codes)))]
        return tool_call_reply("guess", code=code)


def _tricks(env: TextEnv) -> list[Message]:
    code = game_of(env, Mastermind).code
    every = " ".join("".join(pair) for pair in itertools.product(game_of(env, Mastermind).digits, repeat=2))
    tries = (
        " ".join(code),
        f"{code}\n",
        f" {code}",
        code + code,
        ".",
        ".*",
        "[0-9]" * len(code),
        every,
        "",
        code[::-1] + code[0],
    )
    wide = code.translate({ord("0") + number: ord("０") + number for number in range(10)})
    return [tool_call_reply("guess", code=text) for text in (*tries, wide)]
