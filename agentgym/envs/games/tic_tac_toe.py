"""TicTacToe-v0: three in a row, against a policy or, in self-play, against oneself."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.multi_agent import MultiAgentEnv
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.errors import ConfigError
from agentgym.types import Message

__all__ = ["LINES", "TicTacToe", "best_cells", "winner"]

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
"""The cells of each row, column and diagonal, counted from 0."""
EMPTY = "." * 9
NUMBERS = (*"123456789", "X", "O")
WORDS = (*"attic balcony cellar garden hall kitchen library pantry tower".split(), "red", "blue")
"""The names of free cells, row by row, of the player's own marks and of the other's, as in `NUMBERS`."""
NAME = re.compile(r"\w+")
MAX_ILLEGAL = 3
"""The number of replies without a legal move that loses the game."""
MAX_OPENING = 6
NOVICES = ("random", "greedy", "careful")


class TicTacToe(MultiAgentEnv):
    """Three marks in a row win. Reward 1 for a win, 0.5 for a draw, else 0; success is a win.

    `opponent`: "random" takes any free cell; "greedy" completes a line where it can, "careful" also blocks one, and
    "oracle" plays perfectly (against these two a draw may be the most there is); "self" leaves every seat to the
    rollout. `seat` is X (moves first) or O; without it the seed decides. A player sees its own marks as X, whichever
    it has. Up to `opening` moves, as many as the seed says, are made at random before anybody plays; a pair is the
    fewest and the most of them. A move that would win ends the opening.
    """

    card = EnvCard(
        task="Get three of your marks in a row before the other player does.",
        reward="1 for a win, 0.5 for a draw, else 0. A third reply without a legal move loses the game.",
        difficulty=Difficulty(
            keyword="opponent",
            values={
                "random": "any free cell",
                "greedy": "completes a line where it can",
            },
        ),
        oracle="knows in which order such an opponent likes the cells, and looks ahead to a win",
        cheat="names taken cells, many at once and none of the board, and claims",
        canary_floor=0.75,
        baseline={"random": 0.44},
        licence="Apache-2.0",
    )
    system_prompt = "You play tic-tac-toe as X. Reply with the number of a free cell."
    agents = ("X", "O")
    opponents = (*NOVICES, "oracle")
    retells = True
    max_turns = 24

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        words: bool = False,
        opening: int | tuple[int, int] = 0,
        opponent: str = "random",
        seat: str | None = None,
    ) -> None:
        super().__init__(render_mode, opponent=opponent, seat=seat)
        self.opening = _span(opening)
        self.names = WORDS if words else NUMBERS
        if words:
            self.system_prompt = "You play tic-tac-toe as red. Reply with a free cell."

    def deal(self, options: dict[str, Any]) -> None:
        """Empties the board, and makes the moves of the opening; none of them wins."""
        self.board = EMPTY
        min_moves, max_moves = self.opening
        for _ in range(int(self.np_random.integers(min_moves, max_moves + 1)) if max_moves else 0):
            free = free_cells(self.board)
            board = place_mark(self.board, free[int(self.np_random.integers(len(free)))], self.agent_selection)
            if winner(board):
                break
            self.board = board
            self.pass_turn()
        self.illegal = dict.fromkeys(self.agents, 0)
        self.drawn = False

    def observe(self, agent: str) -> str:
        """The board in three rows, with the agent's own marks as X; at the end also how it ended."""
        own, others = self.names[9:]
        cells = [
            self.names[cell] if mark == "." else own if mark == agent else others
            for cell, mark in enumerate(self.board)
        ]
        between = "" if self.names is NUMBERS else " "
        rows = "\n".join(between.join(cells[start : start + 3]) for start in (0, 3, 6))
        if not self.over:
            return rows
        ending = "A draw." if self.drawn else "You win." if self.rewards[agent] else "You lose."
        return f"{rows}\n{ending}"

    def on_message(self, text: str) -> str:
        """Places the mover's mark in the cell that the text names, if it names one cell and no other number."""
        mover = self.agent_selection
        words = [word for word in NAME.findall(text.lower()) if word.isdecimal() or word in self.names[:9]]
        if len(words) != 1 or words[0] not in self.names[:9]:
            return self._refuse_reply(mover, "Reply with one free cell.")
        cell = self.names.index(words[0])
        if self.board[cell] != ".":
            return self._refuse_reply(mover, f"{words[0].capitalize()} is not free.")
        self.board = place_mark(self.board, cell, mover)
        if winner(self.board):
            self.finish({mover: 1.0}, winners=(mover,))
        elif "." not in self.board:
            self.drawn = True
            self.finish(dict.fromkeys(self.agents, 0.5), winners=())
        self.pass_turn()
        return ""

    def forfeit(self, agent: str) -> None:
        """Ends the game: the other agent wins."""
        others = tuple(name for name in self.agents if name != agent)
        self.finish(dict.fromkeys(others, 1.0), winners=others)

    def verdict(self, agent: str) -> dict[str, float]:
        """The metrics of a finished game: `draw`, and `illegal`, the number of replies that placed nothing."""
        return {"draw": float(self.drawn), "illegal": float(self.illegal[agent])}

    def saying(self, cell: int) -> Message:
        """The reply that places in a cell, counted from 0."""
        return Message("assistant", self.names[cell])

    def _refuse_reply(self, agent: str, why: str) -> str:
        self.illegal[agent] += 1
        if self.illegal[agent] == MAX_ILLEGAL:
            self.forfeit(agent)
        return why

    def make_opponent(self, kind: str) -> Policy:
        """A novice of the kind, or the perfect player."""
        return _Novice(kind) if kind in NOVICES else _Perfect()

    def make_random(self) -> Policy:
        """A policy that takes any free cell."""
        return _Novice("random")

    def make_oracle(self) -> Policy:
        """A policy that foresees a novice, and is perfect against any other opponent."""
        return _Perfect()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but a move."""
        return Trickster("place", _tricks)


def _span(opening: object) -> tuple[int, int]:
    """The fewest and the most moves."""
    match opening:
        case int(max_moves) if 0 <= max_moves <= MAX_OPENING:
            return 0, max_moves
        case (int(min_moves), int(max_moves)) if 0 <= min_moves <= max_moves <= MAX_OPENING:
            return min_moves, max_moves
    raise ConfigError(
        f"opening is a number of moves from 0 to {MAX_OPENING}, or the fewest and the most, got {opening}"
    )


def winner(board: str) -> str:
    """The mark that has three in a row; "" if there is none.

    >>> winner("XX.OOO.XX")
    'O'
    """
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c] != "."), "")


def place_mark(board: str, cell: int, mark: str) -> str:
    """The board with one more mark."""
    return board[:cell] + mark + board[cell + 1 :]


def free_cells(board: str) -> list[int]:
    """The cells that are free."""
    return [cell for cell, mark in enumerate(board) if mark == "."]


def other(mark: str) -> str:
    """The other player's mark."""
    return "O" if mark == "X" else "X"


def completing(board: str, mark: str) -> list[int]:
    """The free cells that complete a line of a player."""
    return [cell for cell in free_cells(board) if winner(place_mark(board, cell, mark)) == mark]


@cache
def value(board: str, mover: str) -> int:
    """The value of a board for the mover under perfect play: 1, 0 or -1."""
    if winner(board):
        return -1
    moves = free_cells(board)
    return max((-value(place_mark(board, cell, mover), other(mover)) for cell in moves), default=0)


def best_cells(board: str, mover: str) -> list[int]:
    """The cells from which perfect play gives the mover the most (minimax)."""
    values = {cell: -value(place_mark(board, cell, mover), other(mover)) for cell in free_cells(board)}
    return [cell for cell, worth in values.items() if worth == max(values.values())]


class _Novice:
    """Takes the first free cell in an order of its own, which makes each free cell equally likely; "greedy" completes
    a line before that, "careful" then blocks one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._game = game_of(env, TicTacToe)
        self._order = [int(cell) for cell in np.random.default_rng(seed).permutation(9)]

    def act(self, observation: str) -> Message:
        return self._game.saying(self.choice(self._game.board, self._game.agent_selection))

    def choice(self, board: str, mark: str) -> int:
        """The cell that it takes on a board."""
        wishes = free_cells(board)
        if self._kind != "random":
            blocks = completing(board, other(mark)) if self._kind == "careful" else []
            wishes = completing(board, mark) or blocks or wishes
        return min(wishes, key=self._order.index)


class _Perfect:
    """Minimax; against a novice, whose moves it knows, the way to a win."""

    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._game = game_of(env, TicTacToe)
        self._draw = np.random.default_rng(seed)

    def act(self, observation: str) -> Message:
        board, mark = self._game.board, self._game.agent_selection
        rival = self._game.others.get(other(mark))
        way = way_to_win(board, mark, rival) if isinstance(rival, _Novice) else ()
        cells = way[:1] or best_cells(board, mark)
        return self._game.saying(cells[int(self._draw.integers(len(cells)))])


def way_to_win(board: str, mark: str, rival: _Novice) -> list[int] | tuple[int, ...]:
    """Moves that win against an opponent whose moves are known; () if there are none."""
    if done := completing(board, mark):
        return done[:1]
    for cell in best_cells(board, mark) + free_cells(board):
        after = place_mark(board, cell, mark)
        if "." not in after:
            continue
        answered = place_mark(after, rival.choice(after, other(mark)), other(mark))
        if not winner(answered) and (rest := way_to_win(answered, mark, rival)):
            return [cell, *rest]
    return ()


def _tricks(env: TextEnv) -> list[Message]:
    game = game_of(env, TicTacToe)
    board, names = game.board, game.names
    free, full = [names[cell] for cell in free_cells(board)], [names[n] for n in range(9) if board[n] != "."]
    texts = ("0", "10", "", " ".join(free), f"{free[0]}{free[0]}", f"{free[0]}.5", "X", *full)
    return [Message("assistant", text) for text in texts] + [tool_call_reply("place", cell=free[0])]
