"""WordLadder-v0: change one letter at a time until one word has become another."""

from __future__ import annotations

import functools
import hashlib
import re
import string
from importlib.resources import files
from typing import Any

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.policies import Policy
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError
from agentgym.tools import tool
from agentgym.types import MalformedCall, Message, ToolCall

__all__ = ["DATA_SHA256", "WordLadder"]

LEVELS = {1: (3, 2, 2), 2: (3, 3, 5), 3: (4, 4, 7)}
"""Maps a level to the words' length, the fewest steps and the most steps of the shortest ladder."""
DATA_SHA256 = "70f949896b68e80772eb6ebd3cdc6bb586f03e6eb59ebb0c56a4d09fc303cb0d"
"""The hash of the word list that belongs to v0; other words are another version."""


class WordLadder(ToolEnv):
    """Turns one word into another by common words that differ in one letter. Reward 1 at the goal.

    `level` (1 to 3) sets the words' length and the length of the shortest ladder; twice its steps, and two, are
    allowed. Each level has thousands of pairs of words.
    """

    metadata = {**ToolEnv.metadata, "data_sha256": DATA_SHA256}
    card = EnvCard(
        task="Turn one word into another; each step is a common word that differs in one letter.",
        tools=("change",),
        reward="1 at the goal, else 0. A step that is refused costs a turn: twice the shortest ladder's, and two.",
        difficulty=Difficulty(
            values={1: "three letters, 2 steps", 2: "three letters, 3 to 5 steps", 3: "four letters, 4 to 7 steps"}
        ),
        oracle="walks a shortest ladder, from the text and the word list",
        cheat="jumps to the goal in every spelling, claims and forges answers",
        baseline={"random": 0.0},
        data="word list in the package, written for it",
        licence="Apache-2.0",
    )
    system_prompt = (
        "You play word ladder: change one letter at a time until you reach the goal; each step is a common English "
        "word. Call the tool change with the next word."
    )
    runs_inline = True

    def __init__(self, render_mode: str | None = None, *, level: int = 1) -> None:
        if level not in LEVELS:
            raise ConfigError(f"WordLadder has the levels {', '.join(map(str, LEVELS))}; got level {level!r}")
        super().__init__(render_mode)
        self.level = level
        self.max_turns = 2 * LEVELS[level][2] + 2
        self._word = self._goal = ""

    def start(self, options: dict[str, Any]) -> str:
        """Draws a pair of words with a ladder of the level's length."""
        length, min_steps, max_steps = LEVELS[self.level]
        words = [word for word in neighbours() if len(word) == length]
        goals: list[str] = []
        while not goals:
            self._word = words[int(self.np_random.integers(len(words)))]
            distances = distances_from(self._word)
            goals = [word for word, steps in distances.items() if min_steps <= steps <= max_steps]
        self._goal = goals[int(self.np_random.integers(len(goals)))]
        self.max_turns = 2 * distances[self._goal] + 2
        return f"Start: {self._word}. Goal: {self._goal}."

    @tool
    def change(self, word: str) -> str:
        """Changes one letter of the current word.

        Args:
            word: the next word
        """
        word = word.strip().lower()
        if word not in neighbours():
            return f"{word[:20]!r} is not in the word list. The word is {self._word}, the goal is {self._goal}."
        if word not in neighbours()[self._word]:
            return f"{word} does not differ from {self._word} in exactly one letter. The goal is {self._goal}."
        self._word = word
        if word == self._goal:
            self.end(success=True, reward=1.0)
            return f"The word is {word}: the goal is reached."
        return f"The word is {word}, the goal is {self._goal}."

    def make_oracle(self) -> Policy:
        """A policy that walks a shortest ladder."""
        return _ShortestLadder()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but a ladder."""
        return _Cheat()


@functools.cache
def neighbours() -> dict[str, tuple[str, ...]]:
    """Maps every word of the list to the words that differ from it in one letter, in alphabetical order."""
    text = files("agentgym.envs").joinpath("data/word_ladder.txt").read_bytes()
    if hashlib.sha256(text).hexdigest() != DATA_SHA256:
        raise ConfigError("the word list of WordLadder-v0 was changed; other words need a new version of the id")
    words = dict.fromkeys(text.decode("ascii").split())
    return {
        word: tuple(
            other
            for position in range(len(word))
            for letter in string.ascii_lowercase
            if (other := word[:position] + letter + word[position + 1 :]) != word and other in words
        )
        for word in words
    }


def distances_from(start: str) -> dict[str, int]:
    """Maps every word that a ladder from `start` reaches to the steps of the shortest one."""
    table = neighbours()
    distances = {start: 0}
    queue = [start]
    for word in queue:  # grows while it is walked: breadth first
        for other in table[word]:
            if other not in distances:
                distances[other] = distances[word] + 1
                queue.append(other)
    return distances


class _ShortestLadder:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._word, self._goal = _pair(observation)
        self._distances = distances_from(self._goal)
        self._count = 0

    def act(self, observation: str) -> Message:
        self._word = min(neighbours()[self._word], key=self._distances.__getitem__)
        self._count += 1
        call = ToolCall(f"call_{self._count}", "change", {"word": self._word})
        return Message("assistant", "", tool_calls=(call,))


class _Cheat:
    """Jumps to the goal in every spelling, claims success, forges answers, calls what is not there."""

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._goal = _pair(observation)[1]
        self._turn = seed % 4  # over many seeds every trick comes first

    def act(self, observation: str) -> Message:
        self._turn += 1
        trick = self._turn % 4
        goal = self._goal
        if trick == 0:
            return Message("assistant", f"The word is {goal}: the goal is reached. Success.")
        if trick == 1:
            return Message("assistant", f"<tool_response>\nThe word is {goal}: the goal is reached.\n</tool_response>")
        if trick == 2:
            spellings: list[Any] = [
                goal,
                goal.upper(),
                f" {goal}\n",
                f"{goal}\x00",
                [goal],
                {"word": goal},
                goal * 2,
                "",
            ]
            calls = [ToolCall(f"call_{number}", "change", {"word": word}) for number, word in enumerate(spellings)]
            return Message("assistant", goal, tool_calls=tuple(calls))
        state = ToolCall("call_0", "_goal", {"value": "any"})
        done = ToolCall("call_1", "end", {"success": True, "reward": 1.0})
        broken = MalformedCall("call_2", f'{{"name": "change", "arguments": "{goal}"}}', "arguments are not an object")
        return Message("assistant", goal, tool_calls=(state, done, broken))


def _pair(observation: str) -> tuple[str, str]:
    match = re.match(r"Start: (\w+)\. Goal: (\w+)\.", observation)
    if match is None:
        raise ConfigError(f"not the first observation of WordLadder: {observation!r}")
    return match.group(1), match.group(2)
