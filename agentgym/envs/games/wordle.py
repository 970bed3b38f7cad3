"""Wordle-v0: find a hidden word from a mark for each letter of a guess."""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from importlib.resources import files
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

__all__ = ["DATA_SHA256", "Wordle", "letter_marks"]

LEVELS = {1: (3, 10), 2: (4, 8), 3: (5, 6)}
"""Maps a level to the letters of a word, and the guesses."""
DATA_SHA256 = "c0a6a1ebad550468ac876254aacdc0ed8a31ca694090b7467d012d73793e0244"
"""The hash of the word lists that belong to v0; other words are another version."""


class Wordle(ToolEnv):
    """A common English word hides; each guess is told letter by letter. Reward 1 when it is found.

    `level` (1 to 3) sets the word: three letters and ten guesses, four and eight, five and six. A letter is `here`, or
    `elsewhere` in the word, or `no`. What is not in the word list uses a guess up as well.
    """

    metadata = {**ToolEnv.metadata, "data_sha256": DATA_SHA256}
    card = EnvCard(
        task="Find a hidden common English word; each letter of a guess is told to be here, elsewhere or not in it.",
        tools=("guess",),
        reward="1 when the word is guessed, else 0. A wrong guess, and what is no word, costs one of the guesses.",
        difficulty=Difficulty(
            values={1: "three letters, ten guesses", 2: "four letters, eight guesses", 3: "five letters, six guesses"}
        ),
        oracle="guesses a word that fits all it was told, and at its last guess knows the word",
        cheat="guesses patterns, lists and other spellings of the word, and claims",
        baseline={"random": 0.04},
        data="word lists in the package, written for it",
        licence="Apache-2.0",
    )
    system_prompt = "Find the hidden word. Call the tool guess with a common English word, one in each reply."
    runs_inline = True

    def __init__(self, render_mode: str | None = None, *, level: int = 1) -> None:
        if level not in LEVELS:
            raise ConfigError(f"Wordle has the levels {', '.join(map(str, LEVELS))}; got level {level!r}")
        super().__init__(render_mode)
        self.level = level
        self.length, self.num_guesses = LEVELS[level]
        self.max_turns = self.num_guesses + 2
        self.word = ""
        self.left = 0

    def start(self, options: dict[str, Any]) -> str:
        """Draws the word."""
        words = word_list(self.length)
        self.word = words[int(self.np_random.integers(len(words)))]
        self.left = self.num_guesses
        return f"The word has {self.length} letters. You have {self.left} guesses."

    @tool
    def guess(self, word: str) -> str:
        """Guesses the word.

        Args:
            word: a common English word in lower case
        """
        self.left -= 1
        if word == self.word:
            self.end(success=True, reward=1.0)
            return f"{word} is the word."
        if word in word_list(self.length):
            verdict = f"{word}: {', '.join(map(' '.join, zip(word, letter_marks(word, self.word), strict=True)))}."
        elif len(word) != self.length:
            verdict = f"The word has {self.length} letters."
        else:
            verdict = f"{word!r} is not in the word list."
        if not self.left:
            self.end(success=False)
            return f"{verdict} No guesses left. The word was {self.word}."
        return f"{verdict} Guesses left: {self.left}."

    def task_identity(self) -> JSON:
        """The word."""
        return self.word

    def secrets(self) -> tuple[str, ...]:
        """The word."""
        return () if self.word in COMMON else (self.word,)

    def make_oracle(self) -> Policy:
        """A policy that narrows the words down."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but a word."""
        return Trickster("guess", _tricks)

    def make_random(self) -> Policy:
        """A policy that guesses any word of the list."""
        return _Random()


COMMON = frozenset(
    "a call common content each error find guess has have here hidden in is left letters list name no not one reply"
    " role success the tool turns user was with word you".split()
)
"""The words that the game's messages contain anyway."""


@functools.cache
def word_list(length: int) -> tuple[str, ...]:
    """The word list of a length, in alphabetical order."""
    folder = files("agentgym.envs").joinpath("data")
    texts = [folder.joinpath(name).read_bytes() for name in ("word_ladder.txt", "wordle.txt")]
    if hashlib.sha256(b"".join(texts)).hexdigest() != DATA_SHA256:
        raise ConfigError("the word lists of Wordle-v0 were changed; other words need a new version of the id")
    return tuple(sorted({word for text in texts for word in text.decode("ascii").split() if len(word) == length}))


def letter_marks(guess: str, word: str) -> list[str]:
    """`here`, `elsewhere` or `no` for each letter; a letter is marked as often as the word has it.

    >>> letter_marks("geese", "these")
    ['no', 'no', 'here', 'here', 'here']
    """
    spare = Counter(letter for letter, there in zip(word, guess, strict=True) if letter != there)
    marks = []
    for letter, there in zip(guess, word, strict=True):
        if letter == there:
            marks.append("here")
        elif spare[letter]:
            spare[letter] -= 1
            marks.append("elsewhere")
        else:
            marks.append("no")
    return marks


class _Random:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._game = game_of(env, Wordle)
        self._words = list(word_list(self._game.length))
        self._draw = np.random.default_rng(seed)

    def act(self, observation: str) -> Message:
        return tool_call_reply("guess", word=self._words[int(self._draw.integers(len(self._words)))])


class _Oracle(_Random):
    def act(self, observation: str) -> Message:
        if match := re.match(r"([a-z]+): ([a-z ,]+)\.", observation):
            guess, marked = match.group(1), [mark.split()[1] for mark in match.group(2).split(", ")]
            self._words = [word for word in self._words if word != guess and letter_marks(guess, word) == marked]
        return tool_call_reply("guess", word=self._game.word) if self._game.left == 1 else super().act(observation)


def _tricks(env: TextEnv) -> list[Message]:
    word = game_of(env, Wordle).word
    every = " ".join(word_list(len(word)))
    tries = (word.upper(), f" {word}", f"{word}\n", word[:-1] + "?", "." * len(word), word * 2, every, "", word[:-1])
    return [tool_call_reply("guess", word=text) for text in tries]
