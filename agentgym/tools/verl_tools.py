"""Tools of verl: a `tool_config_path` file, whose classes have `create`, `execute`, `calc_reward` and `release`.

verl's `BaseTool`: `create(instance_id, **kwargs)` begins an episode with the row's `tools_kwargs`, `execute(id,
parameters)` returns text, a reward and metrics, `calc_reward(id)` the reward of the whole episode, and `release(id)`
ends it. All are coroutines; a class needs only `execute`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from agentgym.errors import ConfigError
from agentgym.loading import Wanted
from agentgym.registry import Registry
from agentgym.tools.calling.definition import Tool, register_tool
from agentgym.tools.verl_interactions import VerlInteraction, settle, verl_class, verl_interactions

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse", "VerlTools", "verl_file"]

CLASS = Wanted(noun="tool class", example="Class", hint="verl's classes derive from verl.tools.base_tool.BaseTool.")
_INSTANCES = count()


OpenAIFunctionToolSchema = Mapping[str, Any]
"""The schema of a tool, as verl's files name its type; here it is the mapping itself."""


@dataclass(frozen=True)
class ToolResponse:
    """The answer of a tool, in the place of verl's class of this name."""

    text: str | None = None


class BaseTool:
    """The base of a tool's class where verl is not installed; its file imports it from here and stays as it is."""

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        self.config, self.tool_schema = config, tool_schema
        self.name = str(tool_schema["function"]["name"])

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str | None, ToolResponse]:
        """Begins an episode."""
        return instance_id, ToolResponse()

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Returns the reward of the episode."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends the episode."""


@dataclass(frozen=True)
class _ToolClass:
    """An entry of the file: a class, its configuration and the schema that the model is shown."""

    kind: Callable[..., Any]
    config: Mapping[str, Any]
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


@dataclass
class VerlTools:
    """The tools of one episode; `create_kwargs` has what `create` gets, by tool."""

    classes: tuple[_ToolClass, ...]
    create_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reward: float = 0.0
    """The rewards that calls of `execute` returned since it was read last."""
    _instances: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def open(self) -> list[Tool]:
        """Returns the tools; each is created at its first call, when the row is known."""
        return [
            register_tool(each.schema, partial(self._execute, each), registry=Registry("tool"), timeout_s=None)
            for each in self.classes
        ]

    def close(self) -> None:
        """Does nothing: `finish` ends the instances."""

    def begin(self, row: Mapping[str, Any]) -> None:
        """Takes what `create` gets for a row: its `extra_info.tools_kwargs.NAME.create_kwargs`."""
        extra = row.get("extra_info")
        settings = extra.get("tools_kwargs") if isinstance(extra, Mapping) else None
        pairs = settings.items() if isinstance(settings, Mapping) else ()
        self.create_kwargs = {
            name: dict(each.get("create_kwargs") or {}) for name, each in pairs if isinstance(each, Mapping)
        }

    async def finish(self) -> float:
        """Returns the sum of `calc_reward` of the tools that were called, and releases them."""
        total = 0.0
        for tool, instance in self._instances.values():
            if hasattr(tool, "calc_reward"):
                total += float(await settle(tool.calc_reward(instance)) or 0.0)
            if hasattr(tool, "release"):
                await settle(tool.release(instance))
        self._instances.clear()
        return total

    async def _execute(self, each: _ToolClass, **parameters: Any) -> str:
        if each.name not in self._instances:
            tool, instance = each.kind(dict(each.config), each.schema), f"agentgym-{next(_INSTANCES)}"
            if hasattr(tool, "create"):
                creation = await settle(tool.create(instance, **dict(self.create_kwargs.get(each.name, {}))))
                creation_id = creation[0] if isinstance(creation, tuple) else creation
                instance = creation_id if isinstance(creation_id, str) else instance
            self._instances[each.name] = (tool, instance)
        tool, instance = self._instances[each.name]
        answer = await settle(tool.execute(instance, parameters))
        text, reward = (answer[0], answer[1]) if isinstance(answer, tuple) else (answer, 0.0)
        self.reward += float(reward or 0.0)
        return str(getattr(text, "text", text) or "")


def verl_file(path: Path, text: str) -> Callable[[], VerlTools | VerlInteraction]:
    """Returns the source of a file with `tools` or `interaction`; raises ConfigError for any other."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}") from error
    if isinstance(content, Mapping) and "interaction" in content:
        return verl_interactions(path, content["interaction"])
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{str(path)!r} holds no `tools`, as verl's tool_config_path does, and no `interaction`, as its"
            " interaction_config_path does"
        )
    return partial(VerlTools, tuple(_tool_class(path, number, entry) for number, entry in enumerate(entries)))


def _tool_class(path: Path, number: int, entry: object) -> _ToolClass:
    where = f"{str(path)!r}, tool {number}"
    _, kind, entry = verl_class(where, entry, "execute", CLASS)
    schema = entry.get("tool_schema")
    if not isinstance(schema, Mapping) or not isinstance(schema.get("function"), Mapping):
        raise ConfigError(f"{where}: tool_schema is OpenAI's, with `function`; schemas that a class makes are not read")
    return _ToolClass(kind, entry.get("config") or {}, schema)
