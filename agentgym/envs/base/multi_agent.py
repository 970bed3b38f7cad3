"""Games of several agents that take turns: one is played from outside, the others inside, or all of them outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from agentgym.envs.base.opponents import SELF
from agentgym.envs.base.policies import Policy, policy_for
from agentgym.envs.base.text_env import Info, StepResult
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.types import JSON, Message, ToolResult

__all__ = ["MultiAgentEnv"]


class MultiAgentEnv(ToolEnv, abstract=True):
    """A game whose `agents` take turns, in the words of PettingZoo. A subclass writes `deal`, `observe` and its tools:

        class Nim(MultiAgentEnv):
            agents = ("first", "second")

            def deal(self, options):
                self.left = 10

            def observe(self, agent):
                return f"{self.left} matches are left."

            @tool
            def take(self, number: Literal[1, 2, 3]) -> str:
                \"\"\"Takes one, two or three matches.\"\"\"
                mover = self.agent_selection
                self.left -= number
                if self.left <= 0:
                    self.finish({mover: 1.0}, winners=(mover,))
                self.pass_turn()
                return f"You take {number}."

    `agent_selection` is whose turn it is; a tool acts for it, and the turn stays until `pass_turn`. What a player is
    told is what the tools gave and, behind it, `observe`, as it stands when it is that player's turn again.

    With `opponent` the name of a policy this is an environment of one agent: it plays `agent` (`seat`, or one drawn
    from the seed), and the others move inside each step. With `opponent="self"` a step is a move of
    `agent_selection`, whoever that is: a rollout that plays all seats gives each its own conversation and reward.
    Games are short pure computation (`runs_inline`).
    """

    runs_inline = True
    agents: tuple[str, ...] = ()
    """The names of the seats; the first one moves first."""
    opponents: ClassVar[tuple[str, ...]] = ("random", "oracle")
    """The values that `opponent` may have, besides "self"."""
    retells: ClassVar[bool] = False
    """True if each turn begins a conversation of its own: what an agent sees is all that it needs."""
    agent: str = ""
    """The agent that is played from outside in this episode; with `opponent="self"`, the one that moved last."""
    agent_selection: str = ""
    """The agent whose turn it is."""
    rewards: Mapping[str, float]
    """The reward of each agent, once the game is over."""

    answered: tuple[str, tuple[ToolResult, ...]] = ("", ())
    """The answer to the last reply, before what its player sees now: text, or the results of its calls."""

    _seeds: tuple[int, ...] = ()
    """The seeds of the opponents, which draw their moves from them."""
    _mover: str = ""
    """The agent whose reply is being run: one reply makes one move."""
    _winners: tuple[str, ...] = ()

    def __init__(self, render_mode: str | None = None, *, opponent: str = "random", seat: str | None = None) -> None:
        kinds = (*self.opponents, SELF)
        if opponent not in kinds:
            raise ConfigError(f"{type(self).__name__} has the opponents {', '.join(kinds)}; got {opponent!r}")
        if seat is not None and seat not in self.agents:
            raise ConfigError(f"{type(self).__name__} has the seats {', '.join(self.agents)}; got {seat!r}")
        if seat is not None and opponent == SELF:
            raise ConfigError(f"opponent={SELF} plays every seat: leave seat={seat} out")
        super().__init__(render_mode)
        self.opponent = opponent
        self.seat = seat
        self.rewards = {}
        self.others: dict[str, Policy] = {}

    # What a subclass writes

    def deal(self, options: dict[str, Any]) -> None:
        """Sets the game up from `self.np_random` and `options`."""
        raise NotImplementedError(f"{type(self).__name__} has no deal(self, options)")

    def observe(self, agent: str) -> str:
        """Returns what an agent sees of the game now, without what only the others may know."""
        raise NotImplementedError(f"{type(self).__name__} has no observe(self, agent) -> str")

    def make_opponent(self, kind: str) -> Policy:
        """The policy that plays a seat inside; by default the one that `POLICIES` knows by this name."""
        return policy_for(self, kind)

    def forfeit(self, agent: str) -> None:
        """Ends the game for an agent that ran out of a budget of its rollout. By default no agent earns anything."""
        self.finish({}, winners=())

    def verdict(self, agent: str) -> dict[str, float]:
        """Returns metrics of an agent's finished game besides `success`, such as `draw`."""
        return {}

    # What a subclass calls

    def pass_turn(self) -> None:
        """Ends the mover's turn: the next of `agents` is selected."""
        after = self.agents.index(self.agent_selection) + 1
        self.agent_selection = self.agents[after % len(self.agents)]

    def finish(self, rewards: Mapping[str, float], *, winners: tuple[str, ...]) -> None:
        """Ends the game with the reward of each agent (0 if it is not named) and the agents that succeeded."""
        self.rewards = {agent: float(rewards.get(agent, 0.0)) for agent in self.agents}
        self._winners = winners
        self.end(success=False)

    @property
    def may_move(self) -> bool:
        """True if the reply that is being run has a move left: one reply makes one move."""
        return self.agent_selection == self._mover

    # What a rollout of all seats calls

    @property
    def over(self) -> bool:
        """True if the game has ended."""
        return self._over

    def step_result(self, agent: str, reply: str, results: tuple[ToolResult, ...] = ()) -> StepResult:
        """The result of an agent's step, known when it is its turn again or the game is over.

        It has the answer to the reply (`reply`, or `results` of calls), followed by what the agent sees now.
        """
        seen = self.observe(agent)
        if results:
            *before, last = results
            results = (*before, replace(last, content=_behind(last.content, seen)))
            text = "\n".join(result.content for result in results)
            messages = tuple(
                Message("tool", result.content, tool_call_id=result.call_id, name=result.name) for result in results
            )
        else:
            text = _behind(reply, seen)
            messages = (Message("user", text),)
        info: Info = {"messages": messages, "tool_results": results, "metrics": {}, "agent": agent}
        if self.retells and not self._over:
            info["history"] = (Message("user", text),)
        if self._over:
            info["metrics"] = {"success": float(agent in self._winners), **self.verdict(agent)}
        return text, self.rewards[agent] if self._over else 0.0, self._over, False, info

    # The episode

    def task_identity(self) -> JSON:
        """The agent that is played, what each agent sees of the game, and the seeds of the opponents."""
        return [self.agent, [self.observe(agent) for agent in self.agents], list(self._seeds)]

    def start(self, options: dict[str, Any]) -> str:
        """Deals, seats the opponents, and lets them move until it is the agent's turn."""
        self.rewards, self._winners, self.others, self._seeds = {}, (), {}, ()
        self.agent_selection = self.agents[0]
        self.deal(options)
        self._mover = self.agent = self.agent_selection
        if self.opponent != SELF:
            self.agent = self.seat or self.agents[int(self.np_random.integers(len(self.agents)))]
            for name in self.agents:
                seed = int(self.np_random.integers(2**31))
                if name != self.agent:
                    self._seeds = (*self._seeds, seed)
                    self.others[name] = self.make_opponent(self.opponent)
                    self.others[name].reset(self, self.observe(name), seed)
            self._others_move()
        return self.observe(self.agent)

    def _others_move(self) -> None:
        """Plays the opponents' turns until it is the agent's turn or the game is over."""
        while not self._over and self.agent_selection != self.agent:
            self._mover = self.agent_selection
            message = self.others[self._mover].act(self.observe(self._mover))
            if message.tool_calls:
                self._runner.run_directly(message.tool_calls)
            else:
                self.on_message(message.content)
            if self.may_move and not self._over:
                raise EnvironmentFault(f"the opponent {self.opponent} made no move as {self._mover}: {message}")
        self._mover = self.agent_selection

    def _result(self, text: str, results: tuple[ToolResult, ...], messages: tuple[Message, ...]) -> StepResult:
        """A step of the agent with what the opponents did after it; with all seats played, what the next one sees."""
        if self.opponent == SELF:
            self.answered = ("" if results else text, results)
            self.agent, self._mover = self._mover, self.agent_selection
            observation, reward, over, _, info = self.step_result(self.agent, text, results)
            if not over and self.agent_selection != self.agent:
                observation = self.observe(self.agent_selection)
                info["messages"] = (*messages, Message("user", observation))
                info["tool_results"] = results
            return observation, reward, over, False, info
        self._others_move()
        observation, reward, over, _, info = self.step_result(self.agent, text, results)
        self.metrics["turns"] = float(self._turns)
        lost = {"success": 0.0} if self.max_turns is not None and self._turns >= self.max_turns else {}
        info["metrics"] = {**self.metrics, **lost, **info["metrics"]}
        return observation, reward, over, False, info


def _behind(reply: str, seen: str) -> str:
    """The text `reply`, followed by `seen` on a line of its own."""
    return f"{reply}\n{seen}" if reply else seen
