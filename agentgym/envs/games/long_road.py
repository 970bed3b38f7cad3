"""`LongRoad-v0`: 32 turns on a one-way road, won or lost at one early turn; for comparing how credit is assigned."""

from __future__ import annotations

from typing import Any, Literal

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import StepResult, TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.envs.games.text_game.world import COLOURS, DIRECTIONS, ROOMS, TREASURES
from agentgym.errors import ConfigError
from agentgym.tools import tool
from agentgym.types import JSON, MalformedCall, Message, ToolCall

__all__ = ["LongRoad"]

Direction = Literal["north", "east", "south", "west"]
FEWEST_TURNS = 8
KEY_TURNS = (2, 5)
"""The first and the last turn at which the keys may lie there."""
NUM_KEYS = 4
STUMBLE = 0.1
"""The cost of a reply that reaches no tool. Without it nothing pays for a readable reply at a turn that decides
nothing, and a policy that is paid turn by turn forgets how to call."""


class LongRoad(ToolEnv):
    """A road of `length` turns, without a way back: at one of turns 2 to 5 four keys lie there, and one fits the chest.

    Every reply is a turn, whatever it does. The chest stands at the end, and the quest names its colour: who took the
    key of that colour wins, and nobody takes a second one. The key pays a reward of 1 when it is taken, or, with
    `delayed=True`, when the chest opens. Each way that is walked has luck of its own, `+luck` or `-luck`, and the end
    of the road pays the sum. Nothing tells which, so that it can be neither learned nor foreseen, and it has no part in
    winning.

    So an episode's whole reward says little about the turn that decides it, and 31 other turns share its credit.
    Each turn is told anew (quest, place, bag): any length fits into a small context window.
    """

    card = EnvCard(
        task="Take the one key, of four at an early turn, that fits a chest at the end of a one-way road.",
        tools=("go", "take", "look"),
        reward=(
            "1 for the right key, and on each way a luck of 1 or -1 that nothing tells; a reply that reaches no tool "
            "costs 0.1, and like any other a turn."
        ),
        reward_range=(-35.2, 33.0),
        luck=5.7,
        difficulty=Difficulty(keyword="length", values={8: "8 turns", 32: "32 turns"}),
        oracle="takes the key of the chest, and gives back what luck it has",
        cheat="takes a wrong key, or the right one too early, too late or by another name, claims and forges",
        baseline={"random": 0.0},
        licence="Apache-2.0",
    )
    system_prompt = "Win the quest: take the key of its chest. You can take one key, and there is no way back."
    runs_inline = True

    def __init__(
        self, render_mode: str | None = None, *, length: int = 32, luck: float = 1.0, delayed: bool = False
    ) -> None:
        if length < FEWEST_TURNS:
            raise ConfigError(f"LongRoad has a length of at least {FEWEST_TURNS} turns, got {length}")
        if luck < 0:
            raise ConfigError(f"luck is what a way gives or takes, at least 0, got {luck}")
        super().__init__(render_mode)
        self.max_turns = length
        self.length = length
        self.luck = luck
        self.delayed = delayed

    def start(self, options: dict[str, Any]) -> str:
        """Draws the road: its places, the ways at each, the lucky ones among them, the keys."""
        draw = self.np_random
        self.rooms = [ROOMS[number] for number in draw.integers(len(ROOMS), size=self.length)]
        self.ways = [[tuple(DIRECTIONS)[way] for way in draw.permutation(4)[:2]] for _ in range(self.length)]
        self.lucky = [self.ways[turn][way] for turn, way in enumerate(draw.integers(2, size=self.length))]
        self.keys = [COLOURS[number] for number in draw.permutation(len(COLOURS))[:NUM_KEYS]]
        self.chest = self.keys[int(draw.integers(NUM_KEYS))]
        self.treasure = TREASURES[int(draw.integers(len(TREASURES)))]
        self.key_turn = int(draw.integers(KEY_TURNS[0], KEY_TURNS[1] + 1))
        self.taken = ""
        self.found = 0.0
        self._answered_turn = 0
        return self.view(1)

    @tool
    def go(self, direction: Direction) -> str:
        """Walk through an exit."""
        if self._is_first_call():
            here = self.ways[self.turns - 1]
            if direction in here and self.turns != self.key_turn:
                self.found += self.luck if direction == self.lucky[self.turns - 1] else -self.luck
        return self._move_on()

    @tool
    def take(self, item: str) -> str:
        """Take a key that is here."""
        colour = item.removesuffix(" key")
        if self._is_first_call() and self.turns == self.key_turn and colour in self.keys and item != colour:
            self.taken = colour
            self.reward += float(self.is_right and not self.delayed)
        return self._move_on()

    @tool
    def look(self) -> str:
        """Look around."""
        self._is_first_call()
        return self._move_on()

    def on_message(self, text: str) -> str:
        """Counts a reply without a call as a turn like any other."""
        self.reward -= STUMBLE
        return self._move_on()

    def step(self, action: str) -> StepResult:
        """Plays a reply. One that reached no tool is a turn, too: its error is in the record, and the road goes on."""
        observation, reward, terminated, truncated, info = super().step(action)
        if "history" in info or terminated:
            return observation, reward, terminated, truncated, info
        if self.turns < self.length:
            news = self.view(self.turns + 1)
            info["history"] = (Message("user", news),)
        else:
            news, terminated = self._arrive(), True
            info["metrics"]["success"] = float(self.is_right)
        return f"{observation}\n{news}", self.reward - STUMBLE, terminated, truncated, info

    @property
    def is_right(self) -> bool:
        """True if the key that was taken is that of the chest."""
        return self.taken == self.chest

    def view(self, turn: int) -> str:
        """The observation before a turn: everything that a player needs to know."""
        lines = [f"Quest: {self.treasure} ({self.chest} chest)", f"Room: {self.rooms[turn - 1]}"]
        lines.append(f"Exits: {', '.join(f'{way}: ?' for way in self.ways[turn - 1])}")
        if turn == self.key_turn:
            lines.append(f"Here: {', '.join(f'{colour} key' for colour in self.keys)}")
        if self.taken:
            lines.append(f"Bag: {self.taken} key")
        return "\n".join(lines)

    def make_oracle(self) -> Policy:
        """A policy that takes the key of the chest, and knows the luck: it gives back what it wins on the way."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but taking the right key when it is there."""
        return _Cheat()

    def _is_first_call(self) -> bool:
        """True if this is the turn's first call, the only one that counts."""
        first = self._answered_turn != self.turns
        self._answered_turn = self.turns
        return first

    def _move_on(self) -> str:
        if self.turns >= self.length:
            return self._arrive()
        view = self.view(self.turns + 1)
        self.retell([Message("user", view)])
        return view

    def _arrive(self) -> str:
        """Ends the road: opens the chest or not, and pays what luck gave or took."""
        self.end(success=self.is_right, reward=self.found + float(self.is_right and self.delayed))
        return f"The {self.chest} chest opens." if self.is_right else f"The {self.chest} chest stays locked."


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._road = game_of(env, LongRoad)
        self._balance = 0

    def act(self, observation: str) -> Message:
        road, turn = self._road, self._road.turns
        if turn + 1 == road.key_turn:
            return _call("take", item=f"{road.chest} key")
        if turn + 1 == road.length and not self._balance:
            return _call("look")
        self._balance += -1 if self._balance else 1
        other = next(way for way in road.ways[turn] if way != road.lucky[turn])
        return _call("go", direction=road.lucky[turn] if self._balance else other)


class _Cheat:
    """Takes a wrong key, the right one too early and too late, by other names, in a second call; claims and pokes."""

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._road = game_of(env, LongRoad)
        self._turn = seed % 6  # over many seeds every trick meets the turn that counts

    def act(self, observation: str) -> Message:
        road = self._road
        chest, wrong = road.chest, next(colour for colour in road.keys if colour != road.chest)
        right, now = f"{chest} key", road.turns + 1 == road.key_turn
        self._turn += 1
        tricks = (
            Message("assistant", f"The {chest} chest opens. Success, reward 1.0."),
            _call("take", item=chest if now else right),
            _call("take", item=f" {right}".upper()),
            Message("assistant", "", tool_calls=_call("look").tool_calls + _call("take", item=right).tool_calls),
            Message("assistant", "", tool_calls=(MalformedCall("call_1", f'{{"name": "take", "{right}"', "no JSON"),)),
            _call("end", success=True, reward=1.0),
        )
        return _call("take", item=f"{wrong} key") if now and self._turn % 2 else tricks[self._turn % len(tricks)]


def _call(name: str, **arguments: JSON) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall("call_0", name, arguments),))
