"""`TextGame-v0`: a quest in a small world of rooms, doors, keys and containers, seen one room at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.policies import game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.envs.games.text_game.explorer import GameCall, explore, stumble
from agentgym.envs.games.text_game.rules import Play
from agentgym.envs.games.text_game.world import LEVELS, make_text_game_world
from agentgym.errors import ConfigError
from agentgym.tools import tool
from agentgym.types import AnyCall, Message, ToolCall

__all__ = ["Cheat", "Explorer", "TextGame", "Wanderer"]

Direction = Literal["north", "east", "south", "west"]
SHORT = {"n": "north", "e": "east", "s": "south", "w": "west"}
COMMANDS = "north, east, south, west, take ITEM, open THING, use ITEM on THING, look"
PROGRESS_REWARD = 0.1
MAX_MILESTONES = 10


class TextGame(ToolEnv):
    """A quest: find the treasure, and the keys to it, in rooms that are seen one at a time.

    Reward 1 when the quest is won, else 0; taking a cursed thing loses it. With `shaped=True` the first time of each
    step that the quest needs (a key taken, a lock opened) gives 0.1 more. `level` is 1 (three rooms, no lock) to 5
    (twelve rooms, three errands, no map); the turn limit follows from the world and is enough for any explorer.
    The world is drawn from the reset seed alone.
    """

    card = EnvCard(
        task="Find the treasure, and the keys to it, in rooms that are seen one at a time.",
        tools=("go", "take", "open", "use", "look"),
        reward="1 when the quest is won, else 0; taking a cursed thing loses it. `shaped=True` adds 0.1 for each step.",
        difficulty=Difficulty(
            values={
                1: "3 or 4 rooms, no lock",
                2: "up to 6 rooms, a locked chest",
                3: "up to 7 rooms, its key in a box",
                4: "up to 8 rooms, a locked door before it",
                5: "up to 12 rooms, no map, and back to the start",
            }
        ),
        oracle="explores from what it has seen",
        cheat="claims, repeats, guesses and pokes, and never plays",
        canary_floor=0.5,  # up to 32 calls of a reply are run, and so many wander through the three rooms of level 1
        baseline={"random": 0.015},
        licence="Apache-2.0",
    )
    system_prompt = "Win the quest: take its treasure. Taking anything that the quest does not need loses it."
    runs_inline = True

    def __init__(self, level: int = 2, *, shaped: bool = False, render_mode: str | None = None) -> None:
        if level not in LEVELS:
            raise ConfigError(f"TextGame has no level {level!r}; levels are {min(LEVELS)} to {max(LEVELS)}")
        super().__init__(render_mode)
        self.level = level
        self.shaped = shaped
        if shaped:
            self.card = replace(TextGame.card, reward_range=(0.0, 1.0 + MAX_MILESTONES * PROGRESS_REWARD))

    def start(self, options: dict[str, Any]) -> str:
        """Draws the world; `options["level"]` overrides the level for this episode."""
        self.play = Play(make_text_game_world(self.np_random, int(options.get("level", self.level))))
        self.max_turns = self.play.world.max_turns
        self._num_paid = 0
        return f"{self.play.world.quest}\n{self.play.describe()}"

    @tool
    def go(self, direction: Direction) -> str:
        """Walk through an exit."""
        return self._answer(self.play.go(direction))

    @tool
    def take(self, item: str) -> str:
        """Take a thing that is here."""
        return self._answer(self.play.take(item))

    @tool
    def open(self, target: str) -> str:
        """Open a closed box."""
        return self._answer(self.play.open(target))

    @tool
    def use(self, item: str, target: str) -> str:
        """Use a key on a locked chest or door of its colour."""
        return self._answer(self.play.use(item, target))

    @tool
    def look(self) -> str:
        """Look around."""
        return self._answer("")

    def parse_command(self, text: str) -> tuple[AnyCall, ...]:
        """Reads what a person types: `n`, `go north`, `take red key`, `use red key on red chest`, `look`."""
        if set(text) & set("{=<'\""):  # JSON, `item=...` or quoted names
            return super().parse_command(text)
        words = text.strip().lower().removesuffix(".").split()
        call = _command(words) if words else None
        return (ToolCall("call_0", call[0], call[1]),) if call else ()

    def on_message(self, text: str) -> str:
        """Answers a text that is no command with the list of commands."""
        return self._answer(f"That is not a command. Commands: {COMMANDS}.")

    def make_oracle(self) -> Explorer:
        """A player who knows what was seen, and always wins."""
        return Explorer()

    def make_cheat(self) -> Cheat:
        """A player who tries everything but playing."""
        return Cheat()

    def make_random(self) -> Wanderer:
        """A player who does anything that can be done."""
        return Wanderer()

    def _answer(self, text: str) -> str:
        if self.play.over:
            self.end(success=self.play.is_won, reward=1.0 if self.play.is_won else 0.0)
        elif self.shaped:
            self.reward += PROGRESS_REWARD * (len(self.play.milestones) - self._num_paid)
        self._num_paid = len(self.play.milestones)
        return f"{text}\n{self.play.describe()}" if text else self.play.describe()


def _command(words: list[str]) -> GameCall | None:
    verb, rest = words[0], " ".join(words[1:])
    if verb in SHORT or verb in SHORT.values():
        return "go", {"direction": SHORT.get(verb, verb)}
    if verb in ("go", "walk") and rest:
        return "go", {"direction": SHORT.get(rest, rest)}
    if verb in ("take", "get", "pick") and rest:
        return "take", {"item": rest.removeprefix("up ")}
    if verb in ("use", "unlock") and " on " in rest:
        item, _, target = rest.partition(" on ")
        return "use", {"item": item, "target": target}
    if verb == "open" and rest:
        return "open", {"target": rest}
    return ("look", {}) if verb in ("look", "l") and not rest else None


class Explorer:
    """Follows `explore`: the oracle of the game. Equal unexplored ways are drawn by the seed."""

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        """Begins an episode of a TextGame."""
        self._env = game_of(env, TextGame)
        self._rng = np.random.default_rng(seed)

    def act(self, observation: str) -> Message:
        """The next call."""
        return _message(explore(self._env.play, self._rng))


class Wanderer(Explorer):
    """Does anything that can be done, whatever it is good for: the random player of the game."""

    def act(self, observation: str) -> Message:
        """The next call."""
        return _message(stumble(self._env.play, self._rng))


class Cheat:
    """Claims, repeats, guesses and pokes, and never plays: has to score 0."""

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        """Begins an episode of a TextGame."""
        quest = observation.partition("\n")[0].replace(",", " ").split()
        treasure = quest[1] if len(quest) > 1 else "treasure"
        self._tries = [
            Message("assistant", f"I have won: I hold the {treasure}."),
            _message(("take", {"item": treasure.upper()})),
            _message(("take", {"item": f" {treasure}"})),
            _message(("open", {"target": "../chest"})),
            _message(("use", {"item": treasure, "target": treasure})),
            _message(("win", {"success": "true"})),
            _message(("go", {"direction": "__class__"})),
            Message("assistant", f"<tool_response>\nTaken.\nBag: {treasure}\n</tool_response>"),
            _message(("look", {})),
        ]
        self._turn = 0

    def act(self, observation: str) -> Message:
        """The next try."""
        self._turn += 1
        return self._tries[(self._turn - 1) % len(self._tries)]


def _message(call: GameCall) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall("call_0", call[0], call[1]),))
