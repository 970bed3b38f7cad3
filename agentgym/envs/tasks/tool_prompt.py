"""ToolPrompt-v0: a prompt with tools; it plays a row of a data file, or a small sum if it is given none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentgym.envs.base.action import Action
from agentgym.envs.base.card import SEEDED, EnvCard
from agentgym.envs.base.policies import Policy
from agentgym.envs.base.text_env import StepResult
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.envs.tasks.prompt import Prompt, row_messages, says
from agentgym.errors import ConfigError, nearest
from agentgym.tools.named_tools import named_tools
from agentgym.tools.trl_environment import TrlEnvironment
from agentgym.tools.verl_interactions import VerlInteraction
from agentgym.tools.verl_tools import VerlTools
from agentgym.types import JSON, AnyCall, Message, ToolResult, ToolSpec

__all__ = ["ToolPrompt"]


class ToolPrompt(ToolEnv):
    """One prompt that may be worked on with tools, ended by the first reply without a call. 1 for the right answer.

    `tools` names them (`agentgym.tools.named_tools`). A row of data may choose among them by the names, or schemas, in
    its `tools`. Its messages and its ground truth are as in Prompt-v0, and a reward function scores it as there; the
    rewards of verl's tools are added, and an environment of TRL with `get_reward` pays in place of the ground truth. An
    interaction of verl answers plain replies until it ends the episode, and pays for each in place of the ground truth.
    """

    card = EnvCard(
        task="Answer one prompt, with the help of tools: that of a row of data, or a sum of two numbers.",
        reward="1 for a last reply that is the right answer and nothing else, else 0.",
        oracle="says the ground truth",
        cheat="claims, forges, says all numbers at once and gives the question back",
        baseline={"random": 0.0},
        data=f"rows of the user's files, or {SEEDED}",
        licence="Apache-2.0",
    )

    def __init__(self, render_mode: str | None = None, *, tools: Sequence[str] | str = (), max_turns: int = 16) -> None:
        selection = named_tools([tools] if isinstance(tools, str) else tools)
        super().__init__(render_mode, tools=selection.tools, tool_sources=selection.sources)
        self.max_turns = max_turns
        self.ground_truth: JSON = None
        """The right last reply; None if the row has none."""
        self._is_row = False
        self._sums = Prompt()
        self._row_tools: tuple[ToolSpec, ...] | None = None

    def start(self, options: dict[str, Any]) -> tuple[Message, ...]:
        """Shows the row's messages, or a sum."""
        self._is_row = bool(options)
        self._row_tools = self._choose(options.get("tools"))
        if not options:
            _, info = self._sums.reset(seed=int(self.np_random.integers(2**31)))
            self.ground_truth = self._sums.ground_truth
            messages: tuple[Message, ...] = info["messages"]
            return messages
        self.ground_truth = options.get("ground_truth")
        messages = row_messages(options)
        for source in self._paying():
            if text := source.begin(options):
                messages = (*messages[:-1], replace(messages[-1], content=messages[-1].content + text))
        for interaction in self._interactions():
            interaction.note(messages)
        return messages

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """The tools that the model is shown: all, or those that the row names."""
        return super().tool_specs if self._row_tools is None else self._row_tools

    async def on_message(self, text: str) -> str:  # type: ignore[override]  # the base awaits it
        """Scores a reply without a call, which ends the episode; an interaction of verl may answer it instead."""
        for interaction in self._interactions():
            ends, answer = await interaction.respond()
            if ends:
                self.end(success=interaction.reward > 0, reward=sum([await each.finish() for each in self._paying()]))
            return answer
        correct = says(self.ground_truth, text)
        if self.ground_truth is not None:
            self.metrics["exact_match"] = float(correct)
        paying = self._paying()
        own = 0.0 if any(isinstance(source, TrlEnvironment) and source.has_reward for source in paying) else correct
        self.end(success=correct, reward=float(own) + sum([await source.finish() for source in paying]))
        return "The episode is over."

    def _calls_of(self, action: str) -> tuple[AnyCall, ...]:
        reply = action.message if isinstance(action, Action) else None
        for interaction in self._interactions():
            interaction.reply = reply or Message("assistant", str(action))
        return super()._calls_of(action)

    def _result(self, text: str, results: tuple[ToolResult, ...], messages: tuple[Message, ...]) -> StepResult:
        for source in self._paying():
            self.reward, source.reward = self.reward + source.reward, 0.0
        for interaction in self._interactions():
            interaction.note(messages)
        result = super()._result(text, results, messages)
        if self._is_row:
            result[-1]["metrics"].pop("success", None)  # the reward is the verdict
        return result

    def secrets(self) -> tuple[str, ...]:
        """The answer of a sum, unless the sum names it; a row may contain its answer."""
        return () if self._is_row else self._sums.secrets()

    def make_oracle(self) -> Policy:
        """A policy that gives the ground truth."""
        return self._sums.make_oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but the answer."""
        return self._sums.make_cheat()

    def _paying(self) -> list[VerlTools | TrlEnvironment | VerlInteraction]:
        """Returns the sources that know the row, and may pay for an episode."""
        return [source for source in self._sources if isinstance(source, VerlTools | TrlEnvironment | VerlInteraction)]

    def _interactions(self) -> list[VerlInteraction]:
        """Returns the interactions of a row's episode."""
        return [source for source in self._sources if isinstance(source, VerlInteraction) and source.has_begun]

    def _choose(self, row_tools: object) -> tuple[ToolSpec, ...] | None:
        """Returns the tools of a row that chooses some; raises ConfigError for one that there is not."""
        if row_tools is None:
            return None
        if not isinstance(row_tools, Sequence) or isinstance(row_tools, str):
            raise ConfigError(f"a row's tools are a list of names or schemas, got {row_tools!r:.80}")
        specs = {spec.name: spec for spec in super().tool_specs}
        names = [_name_of(entry) for entry in row_tools]
        for name in names:
            if name not in specs:
                raise ConfigError(f"the row names the tool {name!r}, which is not there{nearest(name, specs) or '.'}")
        return tuple(specs[name] for name in names)


def _name_of(entry: object) -> str:
    """Returns the name of a tool in a row: a text, or OpenAI's schema."""
    if isinstance(entry, Mapping):
        inner = entry.get("function")
        entry = inner.get("name") if isinstance(inner, Mapping) else entry.get("name")
    return str(entry)
