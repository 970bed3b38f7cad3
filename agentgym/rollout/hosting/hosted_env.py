"""An environment as the rollout sees it, wherever its code runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import gymnasium

from agentgym.envs.base.action import Action
from agentgym.envs.base.text_env import TextEnv
from agentgym.errors import AgentGymError
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.types import JSON, MalformedCall, ToolSpec

__all__ = ["DistantTraceback", "Env", "EnvFacts", "HostedEnv", "called_tools", "facts_of", "label_of"]

T = TypeVar("T")
Env: TypeAlias = "gymnasium.Env[str, str]"


class DistantTraceback(AgentGymError):
    """The cause of an error that was raised in another process; its message is the traceback there."""


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """The facts that the rollout reads from an environment after its reset."""

    system_prompt: str = ""
    tool_specs: tuple[ToolSpec, ...] = ()
    wants_tools: bool = False
    """True if the episode has tools and cannot be won without them."""
    task_info: Mapping[str, JSON] = field(default_factory=dict)
    """The record's entries about the task: its digest, and whether no task on the side of its seed was found."""


def facts_of(env: Env) -> EnvFacts:
    """Returns the facts of an environment that was just reset."""
    if not isinstance(env.unwrapped, TextEnv):
        return EnvFacts()
    read_attribute = env.get_wrapper_attr
    specs = read_attribute("tool_specs")
    info: dict[str, JSON] = {"task_digest": read_attribute("task_digest")} if read_attribute("task_digest") else {}
    if info and read_attribute("split_failed"):
        info["split_failed"] = True
    return EnvFacts(read_attribute("system_prompt"), specs, bool(specs) and not read_attribute("tools_optional"), info)


class HostedEnv(ABC):
    """An environment in its place; its calls are awaited instead of blocking.

    `reset` and `step` raise EnvironmentFault (its cause is what the environment raised) or EnvCallTimeout.
    """

    __slots__ = ("facts",)

    def __init__(self) -> None:
        self.facts = EnvFacts()
        """The facts after the last reset."""

    @abstractmethod
    async def reset(self, seed: int, options: dict[str, object] | None) -> EnvStep:
        """Calls the environment's `reset`."""

    @abstractmethod
    async def step(self, action: str) -> EnvStep:
        """Calls the environment's `step`."""

    @abstractmethod
    async def apply(self, function: Callable[[Env], Coroutine[object, object, T]]) -> T:
        """Returns the result of a function that looks into the environment, run in its place before it is closed.

        For another process, function and result are pickled. What the function raises is raised as by `step`.
        """

    @abstractmethod
    async def close(self) -> str | None:
        """Closes the environment in its place, within `close_s`; returns what went wrong, if anything."""


def label_of(name: str, seed: int, call: str, action: str | None = None) -> str:
    """Returns the name of a call for the watchdog, such as `Lock-v0 (seed 3), tool turn, step('...')`."""
    if action is None:
        return f"{name} (seed {seed}), {call}"
    tools = ", ".join(called_tools(action))
    return f"{name} (seed {seed}), {f'tool {tools:.60}, ' if tools else ''}{call}({action!r:.120})"


def called_tools(action: str) -> list[str]:
    """Returns the names of the tools that an action calls, in their order."""
    calls = action.tool_calls if isinstance(action, Action) else ()
    return [call.name for call in calls if not isinstance(call, MalformedCall)]
