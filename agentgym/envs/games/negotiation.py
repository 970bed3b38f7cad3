"""Negotiation-v0: two agents with private values divide items."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.multi_agent import MultiAgentEnv
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.errors import ConfigError
from agentgym.tools import tool
from agentgym.types import JSON, Message

__all__ = ["Negotiation"]

KINDS = {1: ("books", "hats"), 2: ("books", "hats", "balls")}
"""Maps a level to the kinds of items."""
TURNS_EACH = 4
WHOLE = 10
"""The worth of all items together to each agent."""


class Negotiation(MultiAgentEnv):
    """Two agents divide items, which are worth something else to each; what they agree on is theirs.

    Each knows its own values and the least that it has to get. The reward is the value of the own share, in parts of
    the most that any split leaves to an agent when the other one gets its least; 0 without a deal, and for a share
    below the own least. Success is to have that most. `opponent`: "random" makes any offer that gives it its least
    and accepts nothing below it; "self" leaves every seat to the rollout. `seat` is A (speaks first) or B; without it
    the seed decides.
    """

    card = EnvCard(
        task="Divide items with another agent: offer and accept, so that your share is worth much to you.",
        tools=("offer", "accept"),
        reward="The value of the own share over the most that could be had; 0 without a deal and below the own least.",
        difficulty=Difficulty(values={1: "books and hats", 2: "books, hats and balls"}),
        oracle="knows the other's values, and offers the best split that gives the other one its least",
        cheat="offers what there is not, accepts where nothing is offered, and claims",
        canary_floor=0.8,
        baseline={"random": 0.55},
        licence="Apache-2.0",
    )
    system_prompt = (
        "You divide items with another agent. Call offer with what you want to keep (the other one gets the rest), or "
        f"accept to take the last offer. Each of you has {TURNS_EACH} turns; without a deal nobody gets anything."
    )
    agents = ("A", "B")
    opponents = ("random",)
    max_turns = 4 * TURNS_EACH

    def __init__(
        self, render_mode: str | None = None, *, level: int = 1, opponent: str = "random", seat: str | None = None
    ) -> None:
        if level not in KINDS:
            raise ConfigError(f"Negotiation has the levels {', '.join(map(str, KINDS))}; got level {level!r}")
        super().__init__(render_mode, opponent=opponent, seat=seat)
        self.level = level
        self.kinds = KINDS[level]

    def deal(self, options: dict[str, Any]) -> None:
        """Draws items, values and what each agent needs, until a split gives both what they need."""
        draw = self.np_random
        self.left = dict.fromkeys(self.agents, TURNS_EACH)
        self.offered: tuple[int, ...] | None = None
        """The share that the agent who made the last offer keeps."""
        self.spoken = ""
        while True:
            self.items = tuple(int(number) for number in draw.integers(1, 4, len(self.kinds)))
            valuations = _valuations(self.items)
            if not valuations:
                continue
            self.values = {agent: valuations[int(draw.integers(len(valuations)))] for agent in self.agents}
            self.least = {agent: int(draw.integers(1, 6)) for agent in self.agents}
            self.most = {agent: max(map(self._worth(agent), self.splits(agent)), default=0) for agent in self.agents}
            if all(self.most[agent] >= self.least[agent] for agent in self.agents):
                return

    def task_identity(self) -> JSON:
        """The items, their worth to each agent, the least that each needs, and the agent that is played."""
        return [list(self.items), [list(self.values[name]) for name in self.agents], [*self.least.values()], self.agent]

    def splits(self, agent: str) -> Iterator[tuple[int, ...]]:
        """The shares of an agent that leave the other one its least."""
        (other,) = (name for name in self.agents if name != agent)
        for share in itertools.product(*(range(number + 1) for number in self.items)):
            if self.worth(other, self.rest(share)) >= self.least[other]:
                yield share

    def rest(self, share: Sequence[int]) -> tuple[int, ...]:
        """The items that a share leaves."""
        return tuple(number - amount for number, amount in zip(self.items, share, strict=True))

    def worth(self, agent: str, share: Sequence[int]) -> int:
        """The worth of a share to an agent."""
        return sum(value * number for value, number in zip(self.values[agent], share, strict=True))

    def observe(self, agent: str) -> str:
        """The items, the agent's own values, and the offer that it may accept."""
        if self.over:
            return (
                f"A deal: you get {self._format_share(self._share(agent))}." if self.offered is not None else "No deal."
            )
        values = ", ".join(f"{kind} {value}" for kind, value in zip(self.kinds, self.values[agent], strict=True))
        table = (
            f"On the table: {self._format_share(self.items)}. Worth to you, each: {values}. "
            f"You need {self.least[agent]}."
        )
        offer = ""
        if self.offered is not None and self.spoken != agent:
            offer = f" You are offered {self._format_share(self.rest(self.offered))}."
        return f"{table}{offer} Turns left: {self.left[agent]}."

    @tool
    def offer(self, books: int, hats: int, balls: int = 0) -> str:
        """Offers a split.

        Args:
            books: the books that you keep
            hats: the hats that you keep
            balls: the balls that you keep
        """
        if not self.may_move:
            return "Not offered: one offer in each reply."
        share = (books, hats, balls)[: len(self.kinds)]
        there = all(0 <= amount <= number for amount, number in zip(share, self.items, strict=True))
        if there and (balls == 0 or len(self.kinds) == 3):
            self.offered, self.spoken = share, self.agent_selection
            return self._spend_turn("Offered.")
        return self._spend_turn(f"There are {self._format_share(self.items)}.")

    @tool
    def accept(self) -> str:
        """Accepts the other's last offer."""
        agent = self.agent_selection
        if not self.may_move:
            return "Not accepted: one answer in each reply."
        if self.offered is None or self.spoken == agent:
            return self._spend_turn("Nothing is offered to you.")
        shares = {name: self.worth(name, self._share(name)) for name in self.agents}
        content = [name for name in self.agents if shares[name] >= self.least[name]]
        winners = tuple(name for name in content if shares[name] >= self.most[name])
        self.finish({name: min(1.0, shares[name] / self.most[name]) for name in content}, winners=winners)
        return "Accepted."

    def on_message(self, text: str) -> str:
        """Drops talk, which costs a turn."""
        return self._spend_turn("Nothing was offered: call offer or accept.")

    def verdict(self, agent: str) -> dict[str, float]:
        """The metrics of a finished game: `deal`, and `value`, the worth of the share."""
        has_deal = self.offered is not None
        return {"deal": float(has_deal), "value": float(self.worth(agent, self._share(agent))) if has_deal else 0.0}

    def forfeit(self, agent: str) -> None:
        """Ends the game without a deal."""
        self.offered = None
        self.finish({}, winners=())

    def make_opponent(self, kind: str) -> Policy:
        """A policy that offers at random, and accepts nothing below its least."""
        return _Haggler()

    def make_random(self) -> Policy:
        """A policy that offers at random, and accepts what is enough."""
        return _Haggler()

    def make_oracle(self) -> Policy:
        """A policy that knows what the other one needs."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but a deal."""
        return Trickster("offer", _tricks)

    def _worth(self, agent: str) -> Any:
        return lambda share: self.worth(agent, share)

    def _share(self, agent: str) -> tuple[int, ...]:
        assert self.offered is not None
        return self.offered if agent == self.spoken else self.rest(self.offered)

    def _format_share(self, share: Sequence[int]) -> str:
        return ", ".join(f"{number} {kind}" for number, kind in zip(share, self.kinds, strict=True))

    def _spend_turn(self, text: str) -> str:
        """Counts the mover's turn; when neither side has any left, there is no deal."""
        self.left[self.agent_selection] -= 1
        self.pass_turn()
        if not any(self.left.values()):
            self.forfeit(self.agent_selection)
        return text


def _valuations(items: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All values of each kind of item by which all items are worth `WHOLE`."""
    every = itertools.product(*(range(WHOLE // number + 1) for number in items))
    return [values for values in every if sum(map(operator.mul, values, items)) == WHOLE]


class _Haggler:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._game = game_of(env, Negotiation)
        self._draw = np.random.default_rng(seed)

    def act(self, observation: str) -> Message:
        game = self._game
        agent = game.agent_selection
        may_accept = game.offered is not None and game.spoken != agent
        if may_accept and game.worth(agent, game.rest(game.offered or ())) >= game.least[agent]:
            return tool_call_reply("accept")
        every = [*itertools.product(*(range(number + 1) for number in game.items))]
        return _offering([share for share in every if game.worth(agent, share) >= game.least[agent]], self._draw)


class _Oracle(_Haggler):
    def act(self, observation: str) -> Message:
        game = self._game
        agent = game.agent_selection
        best = [share for share in game.splits(agent) if game.worth(agent, share) == game.most[agent]]
        return _offering(best, self._draw)


def _offering(shares: Sequence[Sequence[int]], draw: np.random.Generator) -> Message:
    share = shares[int(draw.integers(len(shares)))]
    return tool_call_reply("offer", **dict(zip(("books", "hats", "balls"), share, strict=False)))


def _tricks(env: TextEnv) -> list[Message]:
    game = game_of(env, Negotiation)
    books, hats = game.items[:2]
    odd: tuple[dict[str, Any], ...] = (
        {"books": books + 1, "hats": hats},
        {"books": -1, "hats": 0},
        {"books": books, "hats": hats, "balls": 99},
        {"books": str(books), "hats": None},
        {"books": float(books), "hats": 0.5},
        {"books": books},
    )
    return [
        *(tool_call_reply("offer", **arguments) for arguments in odd),
        tool_call_reply("accept", offer=game.items[0]),
    ]
