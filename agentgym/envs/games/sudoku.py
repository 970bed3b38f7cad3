"""Sudoku-v0: fill a grid so that each row, column and box holds every digit once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError
from agentgym.tools import tool
from agentgym.types import Message

__all__ = ["Grid", "Sudoku", "solutions"]

LEVELS = {1: (4, 3), 2: (4, 8), 3: (9, 20), 4: (9, 45)}
"""Maps a level to the size of the grid and the number of empty cells."""
SPARE = 2
"""The placements allowed beyond those that the empty cells need."""
Grid = list[list[int]]
"""Rows of digits; 0 is an empty cell."""


class Sudoku(ToolEnv):
    """Fill a grid: each row, column and box holds every digit once. Reward 1 when it is full and right.

    `level` (1 to 4) sets the grid: 4x4 with 3 or 8 empty cells, 9x9 with 20 or 45. There is one solution. A placement
    that breaks a rule is refused; each uses one up, and there are two more than empty cells.
    """

    card = EnvCard(
        task="Fill the empty cells of a Sudoku, which has one solution, one placement at a time.",
        tools=("place",),
        reward=(
            "1 when the grid is full and right, else 0. A placement that breaks a rule is refused and, like one that "
            "only turns out wrong later, costs one of the placements: two more than there are empty cells."
        ),
        difficulty=Difficulty(
            values={
                1: "4x4, 3 empty cells",
                2: "4x4, 8 empty cells",
                3: "9x9, 20 empty cells",
                4: "9x9, 45 empty cells",
            }
        ),
        oracle="places the solution's digits, cell by cell",
        cheat="overwrites what is given, breaks rules, places beside the grid and claims",
        baseline={"random": 0.07},
        licence="Apache-2.0",
    )
    system_prompt = (
        "Fill the grid: each row, column and box holds every digit once. Call the tool place with row and column, "
        "which count from 1, and a digit."
    )
    runs_inline = True

    def __init__(self, render_mode: str | None = None, *, level: int = 1) -> None:
        if level not in LEVELS:
            raise ConfigError(f"Sudoku has the levels {', '.join(map(str, LEVELS))}; got level {level!r}")
        super().__init__(render_mode)
        self.level = level
        self.size, self.num_empty = LEVELS[level]
        self.max_turns = self.num_empty + 2 * SPARE
        self.grid: Grid = []
        self.given: Grid = []
        self.solution: Grid = []

    def start(self, options: dict[str, Any]) -> str:
        """Draws a full grid, and empties cells while it has one solution."""
        self.given = []
        while not self.given:
            self.solution = _full_grid(self.size, self.np_random)
            self.given = _clear_cells(self.solution, self.num_empty, self.np_random)
        self.grid = [list(row) for row in self.given]
        self._num_left = self.num_empty + SPARE
        box = math.isqrt(self.size)
        return f"Digits 1 to {self.size}, boxes {box}x{box}, '.' is empty.\n{self.view()}"

    @tool
    def place(self, row: int, column: int, digit: int) -> str:
        """Places a digit.

        Args:
            row: counted from 1
            column: counted from 1
            digit: the digit
        """
        self._num_left -= 1
        verdict = self._try_placement(row, column, digit)
        if self.grid == self.solution:
            self.end(success=True, reward=1.0)
            return "The grid is solved."
        if not self._num_left:
            self.end(success=False)
            return f"{verdict} No placements left."
        return f"{verdict}\n{self.view()}"

    def view(self) -> str:
        """The grid, a line for each row, and how many placements are left."""
        rows = [" ".join(str(digit) if digit else "." for digit in row) for row in self.grid]
        return "\n".join([*rows, f"Placements left: {self._num_left}."])

    def secrets(self) -> tuple[str, ...]:
        """The solution, spelled in two ways."""
        rows = [list(map(str, row)) for row in self.solution]
        return "\n".join(" ".join(row) for row in rows), "".join("".join(row) for row in rows)

    def make_oracle(self) -> Policy:
        """A policy that knows the solution."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but filling the grid."""
        return Trickster("place", _tricks)

    def make_random(self) -> Policy:
        """A policy that places any digit in any empty cell."""
        return _Random()

    def _try_placement(self, row: int, column: int, digit: int) -> str:
        if not (1 <= row <= self.size and 1 <= column <= self.size and 1 <= digit <= self.size):
            return f"Rows, columns and digits are 1 to {self.size}."
        if self.given[row - 1][column - 1]:
            return f"Row {row}, column {column} is given."
        digit_before, self.grid[row - 1][column - 1] = self.grid[row - 1][column - 1], 0
        if digit not in _possible(self.grid, row - 1, column - 1):
            self.grid[row - 1][column - 1] = digit_before
            return f"{digit} is already in that row, column or box."
        self.grid[row - 1][column - 1] = digit
        return "Placed."


def solutions(grid: Grid, limit: int = 2) -> int:
    """The number of solutions of a grid, counted up to `limit`."""
    size, box = len(grid), math.isqrt(len(grid))
    rows, columns, boxes = [0] * size, [0] * size, [0] * size  # bit d is set where the digit d is used
    empty = []
    for row, digits in enumerate(grid):
        for column, digit in enumerate(digits):
            cell = row, column, row // box * box + column // box
            if digit:
                _flip(rows, columns, boxes, cell, 1 << digit)
            else:
                empty.append(cell)
    digit_bits = (2 << size) - 2

    def count(limit: int) -> int:
        fewest, free = size + 1, 0
        for cell in empty:
            row, column, square = cell
            possible = digit_bits & ~(rows[row] | columns[column] | boxes[square])
            if possible.bit_count() < fewest:
                fewest, free, chosen = possible.bit_count(), possible, cell
        if not empty:
            return 1
        empty.remove(chosen)
        num_solutions = 0
        while free and num_solutions < limit:
            bit = free & -free
            free ^= bit
            _flip(rows, columns, boxes, chosen, bit)
            num_solutions += count(limit - num_solutions)
            _flip(rows, columns, boxes, chosen, bit)
        empty.append(chosen)
        return num_solutions

    return count(limit)


def _flip(rows: list[int], columns: list[int], boxes: list[int], cell: tuple[int, int, int], bit: int) -> None:
    row, column, square = cell
    rows[row] ^= bit
    columns[column] ^= bit
    boxes[square] ^= bit


def _possible(grid: Grid, row: int, column: int) -> set[int]:
    """The digits that break no rule in a cell."""
    box = math.isqrt(len(grid))
    top, left = row // box * box, column // box * box
    used = set(grid[row]) | {line[column] for line in grid}
    for line in grid[top : top + box]:
        used.update(line[left : left + box])
    return set(range(1, len(grid) + 1)) - used


def _full_grid(size: int, draw: np.random.Generator) -> Grid:
    """A full grid: one pattern, with its digits, its rows and its columns shuffled as the rules allow."""
    box = math.isqrt(size)

    def line_order() -> list[int]:
        return [int(band) * box + int(line) for band in draw.permutation(box) for line in draw.permutation(box)]

    digits = [int(digit) for digit in draw.permutation(size)]
    rows, columns = line_order(), line_order()
    return [[digits[(box * (row % box) + row // box + column) % size] + 1 for column in columns] for row in rows]


def _clear_cells(full: Grid, num_empty: int, draw: np.random.Generator) -> Grid:
    """The grid with cells emptied in a drawn order; [] if that many cannot be emptied with one solution left."""
    grid = [list(row) for row in full]
    size = len(grid)
    left = num_empty
    for cell in draw.permutation(size * size):
        row, column = divmod(int(cell), size)
        grid[row][column] = 0
        if solutions([list(line) for line in grid]) == 1:
            left -= 1
        else:
            grid[row][column] = full[row][column]
        if not left:
            return grid
    return []


def _empty_cells(grid: Grid) -> list[tuple[int, int]]:
    return [(row, column) for row, digits in enumerate(grid) for column, digit in enumerate(digits) if not digit]


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._game = game_of(env, Sudoku)

    def act(self, observation: str) -> Message:
        row, column = _empty_cells(self._game.grid)[0]
        return tool_call_reply("place", row=row + 1, column=column + 1, digit=self._game.solution[row][column])


class _Random(_Oracle):
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        super().reset(env, observation, seed)
        self._draw = np.random.default_rng(seed)

    def act(self, observation: str) -> Message:
        cells = _empty_cells(self._game.grid)
        row, column = cells[int(self._draw.integers(len(cells)))]
        digit = int(self._draw.integers(1, self._game.size + 1))
        return tool_call_reply("place", row=row + 1, column=column + 1, digit=digit)


def _tricks(env: TextEnv) -> list[Message]:
    game = game_of(env, Sudoku)
    row, column = _empty_cells(game.given)[0]
    right = game.solution[row][column]
    wrong = right % game.size + 1
    clue = next((r, c) for r in range(game.size) for c in range(game.size) if game.given[r][c])
    return [
        tool_call_reply("place", row=clue[0] + 1, column=clue[1] + 1, digit=game.given[clue[0]][clue[1]]),
        tool_call_reply("place", row=row + 1, column=column + 1, digit=wrong),
        tool_call_reply("place", row=row - game.size + 1, column=column + 1, digit=right),
        tool_call_reply("place", row=row + 1, column=column + 1, digit=0),
        tool_call_reply("place", row=row + 1, column=column + 1, digit=str(right)),
        tool_call_reply("place", row=0, column=0, digit=10**12),
        tool_call_reply("place", solution="".join(str(digit) for line in game.solution for digit in line)),
    ]
