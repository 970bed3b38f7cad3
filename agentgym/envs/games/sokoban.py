"""Sokoban-v0: push boxes onto goals, on a map of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError
from agentgym.tools import tool
from agentgym.types import Message

__all__ = ["Sokoban", "SokobanRoom", "State", "shortest_way"]

Direction = Literal["up", "down", "left", "right"]
Cell: TypeAlias = tuple[int, int]
State: TypeAlias = tuple[Cell, frozenset[Cell]]
"""The cell of the player, and the cells of the boxes; cells are (row, column)."""
STEPS: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LEVELS = {1: (4, 3, 1, (2, 5)), 2: (5, 3, 1, (5, 12)), 3: (5, 3, 2, (8, 18))}
"""Maps a level to the room's side, walls inside it, boxes, and the fewest and most moves of the shortest solution."""
SPARE = 4
"""The moves allowed beyond twice the shortest solution."""


@dataclass(frozen=True)
class SokobanRoom:
    """The parts that do not move: the floor and the goals."""

    size: int
    floor: frozenset[Cell]
    goals: frozenset[Cell]

    def next_state(self, state: State, direction: str) -> State:
        """The state after a move; the same one if a wall or a box is in the way."""
        player, boxes = state
        ahead = _next(player, direction)
        if ahead not in self.floor:
            return state
        if ahead not in boxes:
            return ahead, boxes
        beyond = _next(ahead, direction)
        if beyond not in self.floor or beyond in boxes:
            return state
        return ahead, boxes - {ahead} | {beyond}

    def before(self, state: State) -> Iterator[State]:
        """Every other state from which one move leads to `state`."""
        player, boxes = state
        for direction in STEPS:
            ahead, behind = _next(player, direction), _next(player, direction, -1)
            if behind in self.floor and behind not in boxes:
                yield behind, boxes
                if ahead in boxes:
                    yield behind, boxes - {ahead} | {player}

    def is_solved(self, state: State) -> bool:
        """True if every box is on a goal."""
        return state[1] == self.goals

    def draw_map(self, state: State) -> str:
        """The map, a line for each row."""
        player, boxes = state

        def sign(cell: Cell) -> str:
            if cell not in self.floor:
                return "#"
            on_goal = cell in self.goals
            if cell in boxes:
                return "*" if on_goal else "B"
            if cell == player:
                return "+" if on_goal else "P"
            return "o" if on_goal else "."

        side = range(self.size + 2)
        return "\n".join(" ".join(sign((row, column)) for column in side) for row in side)


class Sokoban(ToolEnv):
    """Push every box onto a goal, on a map of text. Reward 1 when all are there.

    `level` (1 to 3) sets the room, which has walls inside: 4x4 with one box, 5x5 with one box, 5x5 with two.
    Every map can be solved. A box cannot be pulled, and there are twice the moves of a shortest solution, and four; a
    move against a wall uses one up.
    """

    card = EnvCard(
        task="Push every box of a small room onto a goal.",
        tools=("move",),
        reward=(
            "1 when all boxes are on goals, else 0. A move against a wall costs a move, of which there are four more "
            "than twice the shortest solution; a box in a corner stays there."
        ),
        difficulty=Difficulty(
            values={
                1: "4x4 with walls, one box, 2 to 5 moves",
                2: "5x5 with walls, one box, 5 to 12 moves",
                3: "5x5 with walls, two boxes, 8 to 18 moves",
            }
        ),
        oracle="walks a shortest solution, found by search",
        cheat="walks against walls, names no direction, and claims",
        canary_floor=0.3,
        baseline={"random": 0.1},
        licence="Apache-2.0",
    )
    system_prompt = (
        "Push every box onto a goal. # wall, . floor, o goal, B box, * box on a goal, P you, + you on a goal. "
        "Call the tool move with a direction."
    )
    runs_inline = True

    def __init__(self, render_mode: str | None = None, *, level: int = 1) -> None:
        if level not in LEVELS:
            raise ConfigError(f"Sokoban has the levels {', '.join(map(str, LEVELS))}; got level {level!r}")
        super().__init__(render_mode)
        self.level = level
        self.left = 0

    def start(self, options: dict[str, Any]) -> str:
        """Draws a room, and takes its boxes away from the goals, backwards from the solution."""
        size, num_walls, num_boxes, (min_steps, max_steps) = LEVELS[self.level]
        starts: list[tuple[State, int]] = []
        while not starts:
            self.room = _room(size, num_walls, num_boxes, self.np_random)
            starts = [(state, steps) for state, steps in _distances(self.room, max_steps) if steps >= min_steps]
        self.state, steps = starts[int(self.np_random.integers(len(starts)))]
        self.left = 2 * steps + SPARE
        self.max_turns = self.left + 2
        return self.view()

    @tool
    def move(self, direction: Direction) -> str:
        """Moves one step, and pushes a box that is there."""
        self.left -= 1
        before, self.state = self.state, self.room.next_state(self.state, direction)
        if self.room.is_solved(self.state):
            self.end(success=True, reward=1.0)
            return "All boxes are on goals."
        if not self.left:
            self.end(success=False)
            return "No moves left."
        return f"Something is in the way.\n{self.view()}" if before == self.state else self.view()

    def view(self) -> str:
        """The map, and how many moves are left."""
        return f"{self.room.draw_map(self.state)}\nMoves left: {self.left}."

    def make_oracle(self) -> Policy:
        """A policy that walks a shortest solution."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but pushing a box."""
        return Trickster("move", _tricks)


def shortest_way(room: SokobanRoom, state: State) -> list[str] | None:
    """The directions of a shortest solution; None if there is none."""
    ways: dict[State, tuple[State, str] | None] = {state: None}
    queue = [state]
    for here in queue:  # grows while it is walked: breadth first
        if room.is_solved(here):
            return _directions_to(ways, here)
        for direction in STEPS:
            there = room.next_state(here, direction)
            if there not in ways:
                ways[there] = (here, direction)
                queue.append(there)
    return None


def _directions_to(ways: dict[State, tuple[State, str] | None], end: State) -> list[str]:
    directions: list[str] = []
    step = ways[end]
    while step is not None:
        directions.append(step[1])
        step = ways[step[0]]
    return directions[::-1]


def _distances(room: SokobanRoom, max_steps: int) -> list[tuple[State, int]]:
    """Every state that can be solved in at most `max_steps` moves, with the number of moves."""
    solved = [(player, room.goals) for player in sorted(room.floor - room.goals)]
    distances: dict[State, int] = dict.fromkeys(solved, 0)
    queue: list[State] = list(solved)
    for state in queue:  # grows while it is walked: breadth first
        if distances[state] == max_steps:
            break
        for earlier in room.before(state):
            if earlier not in distances:
                distances[earlier] = distances[state] + 1
                queue.append(earlier)
    return list(distances.items())


def _room(size: int, num_walls: int, num_boxes: int, draw: np.random.Generator) -> SokobanRoom:
    cells = [(row, column) for row in range(1, size + 1) for column in range(1, size + 1)]
    order = [cells[int(index)] for index in draw.permutation(len(cells))]
    floor = frozenset(order[num_walls:])
    return SokobanRoom(size, floor, frozenset(order[num_walls : num_walls + num_boxes]))


def _next(cell: Cell, direction: str, steps: int = 1) -> Cell:
    down, right = STEPS[direction]
    return cell[0] + steps * down, cell[1] + steps * right


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        game = game_of(env, Sokoban)
        self._way = shortest_way(game.room, game.state) or []

    def act(self, observation: str) -> Message:
        return tool_call_reply("move", direction=self._way.pop(0))


def _tricks(env: TextEnv) -> list[Message]:
    game = game_of(env, Sokoban)
    away = [way for way in STEPS if game.room.next_state(game.state, way) == game.state]
    tries = [*away, "Up", "north", "up up", "solve", "", 1, None, [*STEPS]]
    return [tool_call_reply("move", direction=way) for way in tries]
