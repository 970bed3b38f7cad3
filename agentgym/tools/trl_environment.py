"""Environments of TRL: the class of an `environment_factory`, whose methods are tools.

TRL's form: `reset(**columns)` begins an episode with the row's columns, and returns text for the end of the prompt, or
None; every other public method is a tool; `get_reward()`, where there is one, gives the reward of the episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentgym.errors import ConfigError
from agentgym.tools.calling.definition import Tool, as_tool

__all__ = ["TrlEnvironment", "is_trl_environment"]

NO_TOOLS = ("reset", "get_reward")


def is_trl_environment(target: object) -> bool:
    """Returns True for a class in TRL's form; raises ConfigError for an environment of Gymnasium's."""
    if not inspect.isclass(target) or not callable(getattr(target, "reset", None)):
        return False
    if hasattr(target, "step"):
        raise ConfigError(f"{target.__name__} is an environment with steps, and no set of tools: name it with --env")
    return True


class TrlEnvironment:
    """The environment of one episode."""

    reward = 0.0
    """The reward of calls: TRL pays at the end alone."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        self._env = kind()

    def open(self) -> list[Tool]:
        """Returns the tools: the public methods."""
        members = inspect.getmembers(type(self._env), predicate=inspect.isfunction)
        names = [name for name, _ in members if name not in NO_TOOLS and not name.startswith("_")]
        return [as_tool(getattr(self._env, name)) for name in names]

    def close(self) -> None:
        """Does nothing: the instance ends with its episode."""

    @property
    def has_reward(self) -> bool:
        """True if the environment pays the reward of an episode."""
        return callable(getattr(self._env, "get_reward", None))

    def begin(self, row: Mapping[str, Any]) -> str | None:
        """Begins the episode of a row; returns the text that belongs at the end of its prompt."""
        extra = row.get("extra_info")
        columns = {"prompt": row.get("messages"), **(extra if isinstance(extra, Mapping) else {})}
        if "ground_truth" in row:
            columns |= dict.fromkeys(("ground_truth", "answer", "solution"), row["ground_truth"])
        parameters = inspect.signature(self._env.reset).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        text = self._env.reset(**{name: value for name, value in columns.items() if takes_all or name in parameters})
        return None if text is None else str(text)

    async def finish(self) -> float:
        """Returns the reward of the episode."""
        if not self.has_reward:
            return 0.0
        value = self._env.get_reward()
        return float(await value if inspect.isawaitable(value) else value)
