"""Converts a row to a task: finds its columns, checks them, and makes the options for the environment's reset."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentgym.data.config import COLUMNS, TOOL_PROMPT, DataConfig
from agentgym.data.digest import prompt_digest, row_seed
from agentgym.data.table import Cells, Table, describe_value, to_json_value
from agentgym.errors import AgentGymError, ConfigError, nearest
from agentgym.openai_wire import message_from_openai
from agentgym.types import JSON, MalformedCall, Message, Task

__all__ = ["PROMPT_ENV", "ColumnLayout", "Placed", "messages_of", "read_tasks"]

PROMPT_ENV = "Prompt-v0"
"""The environment that plays a row unless something names another: one prompt, one reply."""
SINGLE_TURN = ("single_turn_agent",)
"""verl's names for an agent that sends one reply."""
TOOL_AGENT = ("tool_agent",)
"""verl's name for an agent with tools, which `tools` gives."""
NAMES_ENV = re.compile(r".+:[A-Za-z_]\w*|.+-v\d+")
MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True, slots=True)
class Placed:
    """A task with its location: `Placed("train.parquet, row 17", task, prompt_digest(task))`."""

    where: str
    task: Task
    prompt: str
    """The digest of the task's prompt."""


@dataclass(frozen=True, kw_only=True)
class ColumnLayout:
    """The columns of a table for the parts of a row: `{"prompt": ("question",), ...}`, each a path of keys."""

    paths: Mapping[str, tuple[str, ...]]
    kept: tuple[str, ...]
    media: tuple[str, ...]
    keys: Mapping[str, Sequence[str]]
    """The `keys` of the table."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return tuple(dict.fromkeys([*(path[0] for path in self.paths.values()), *self.kept, *self.media]))

    def describe_columns(self, table: Table) -> str:
        """Returns a text with the column of each part, and the columns that are not read."""
        parts = [f"{part}: {'.'.join(path)}" for part, path in self.paths.items()]
        unread = [name for name in table.columns if name not in self.columns]
        return "; ".join([*parts, *([f"not read: {', '.join(unread)}"] if unread else [])])


def layout_of(table: Table, config: DataConfig) -> ColumnLayout:
    """Finds the columns; raises ConfigError, with the nearest valid name, if a required one is missing."""
    paths: dict[str, tuple[str, ...]] = {}
    for part, candidates in COLUMNS.items():
        if part == "tools" and not config.tools:
            continue
        setting = config.columns.get(part)
        path = next(
            (column for name in ([setting] if setting else candidates) if (column := _path(name, table.columns))), None
        )
        if path is not None:
            paths[part] = path
        elif setting:
            raise ConfigError(
                f"{table.name} has no column {setting!r} for {part}{_list_columns(setting, table.columns)}"
            )
    if "prompt" not in paths:
        missing = f"{table.name} has no column for the prompt ({', '.join(COLUMNS['prompt'])})"
        near = next((hint for name in COLUMNS["prompt"] if (hint := nearest(name, table.columns))), "")
        columns = ", ".join(table.columns)
        raise ConfigError(f"{missing}{near or '.'} It has {columns}; columns prompt=NAME says which it is")
    for name in config.keep:
        if name not in table.columns:
            raise ConfigError(f"{table.name} has no column {name!r} to keep{_list_columns(name, table.columns)}")
    media = tuple(name for name in MEDIA if name in table.columns)
    return ColumnLayout(paths=paths, kept=tuple(config.keep), media=media, keys=table.keys)


def _path(name: str, columns: Sequence[str]) -> tuple[str, ...] | None:
    if name in columns:
        return (name,)
    path = tuple(name.split("."))
    return path if path[0] in columns else None


def _list_columns(name: str, columns: Sequence[str]) -> str:
    return f"{nearest(name, columns) or '.'} It has {', '.join(columns)}"


def read_tasks(table: Table, config: DataConfig, env_id: str | None) -> Iterator[Placed]:
    """Yields the tasks of a table, row by row; raises ConfigError, naming file, row and column, for an invalid row."""
    reader = _Reader(layout_of(table, config), config, env_id) if table.columns else None
    for where, cells in table.rows(reader.layout.columns if reader else ()):
        if isinstance(cells, Task):
            options = to_json_value(cells.options, f"{where}, its options")
            assert isinstance(options, dict)
            task = replace(cells, options=options)
        elif reader is None:
            raise ConfigError(f"{where} has no columns; {', '.join(COLUMNS['prompt'])} was wanted")
        else:
            task = reader.task(where, cells)
        yield Placed(where, task, prompt_digest(task))


class _Reader:
    """Reads the rows of one table, which all have the same layout."""

    def __init__(self, layout: ColumnLayout, config: DataConfig, env_id: str | None) -> None:
        self.layout = layout
        self.config = config
        self.env_id = env_id
        self._truths: dict[JSON, tuple[bool, str]] = {}
        """Maps each data source to whether its rows have a ground truth, and to the location of its first row."""

    def task(self, where: str, cells: Cells) -> Task:
        assert isinstance(cells, Mapping)
        for name in self.layout.media:
            if _holds(cells.get(name)):
                raise ConfigError(f"{where}: column {name!r} holds media; only text is supported")
        options: dict[str, JSON] = {"messages": self._messages(where, cells)}
        source = self._text("data_source", where, cells)
        truth = to_json_value(self._cell("ground_truth", where, cells), self._column_label("ground_truth", where))
        self._check_truth(truth is not None, source, where)
        extra = self._extra(where, cells)
        parts: dict[str, JSON] = {"ground_truth": truth, "data_source": source, "extra_info": extra}
        tools = to_json_value(self._cell("tools", where, cells), self._column_label("tools", where))
        options |= {name: value for name, value in {**parts, "tools": tools}.items() if value is not None}
        env_id = self._env(self._text("agent_name", where, cells), where)
        return Task(env_id, row_seed(env_id, options), options)

    def _column_label(self, part: str, where: str) -> str:
        return f"{where}: column {'.'.join(self.layout.paths.get(part, (part,)))!r}"

    def _cell(self, part: str, where: str, cells: Mapping[str, object]) -> object:
        """Returns the value of a part, or None if its column is null or not in this row."""
        path = self.layout.paths.get(part)
        if path is None:
            return None
        value = cells.get(path[0])
        for depth, key in enumerate(path[1:], 1):
            if value is None:
                return None
            column = ".".join(path[:depth])
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: column {column!r} is a mapping with {key!r}, got {describe_value(value)}")
            if key not in value and key not in self.layout.keys.get(column, ()):
                raise ConfigError(f"{where}: column {column!r} has no {key!r}{_list_columns(key, [*map(str, value)])}")
            value = value.get(key)
        return value

    def _text(self, part: str, where: str, cells: Mapping[str, object]) -> str | None:
        value = self._cell(part, where, cells)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self._column_label(part, where)} is a text, got {describe_value(value)}")
        return value

    def _extra(self, where: str, cells: Mapping[str, object]) -> JSON:
        value = to_json_value(self._cell("extra_info", where, cells), self._column_label("extra_info", where))
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self._column_label('extra_info', where)} is a mapping, got {describe_value(value)}")
        path = ".".join(self.layout.paths.get("extra_info", ()))
        keys = self.layout.keys.get(path, ())  # of all rows: they are columns, which reward functions index
        extra: dict[str, JSON] = {} if value is None else {**dict.fromkeys(keys), **value}
        for name in self.layout.kept:
            if name in extra:
                raise ConfigError(f"{where}: the column {name!r} is to be kept, and extra_info has one of that name")
            extra[name] = to_json_value(cells.get(name), f"{where}: column {name!r}")
        return extra if extra or value is not None else None

    def _messages(self, where: str, cells: Mapping[str, object]) -> JSON:
        label, path = self._column_label("prompt", where), self.layout.paths["prompt"]
        if path[0] not in cells:
            raise ConfigError(f"{where} has no {path[0]!r}, as other rows do{_list_columns(path[0], [*cells])}")
        value = to_json_value(self._cell("prompt", where, cells), label)
        if isinstance(value, str) and value.strip():
            return [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{label} is a list of messages or a text that is not empty, got {describe_value(value)}")
        messages = [_without_null_fields(message) for message in value]
        _check_messages(messages, label)
        return messages

    def _check_truth(self, is_there: bool, source: str | None, where: str) -> None:
        """Checks that either all or none of a source's rows have a ground truth, since they are scored alike."""
        others, first = self._truths.setdefault(source, (is_there, where))
        if others is not is_there:
            lacking, having = (first, where) if is_there else (where, first)
            column = self._column_label("ground_truth", lacking)
            raise ConfigError(f"{column} is null, and {having.rpartition(', ')[2]} has a ground truth")

    def _env(self, agent: str | None, where: str) -> str:
        if agent is not None and agent in self.config.agents:
            return self.config.agents[agent]
        if agent is None or agent in SINGLE_TURN or (agent in TOOL_AGENT and self.config.tools):
            return self.env_id or PROMPT_ENV
        if NAMES_ENV.fullmatch(agent):
            return agent
        if self.env_id in (None, PROMPT_ENV, TOOL_PROMPT):
            near = nearest(agent, [*self.config.agents, *SINGLE_TURN]) or "."
            raise ConfigError(
                f"{self._column_label('agent_name', where)}: {agent!r} names no environment{near} "
                f"agents {agent}=path/to/file.py:Class says which one plays it"
                + (", and --tools gives it tools" if agent in TOOL_AGENT else "")
            )
        return self.env_id


def messages_of(task: Task) -> tuple[Message, ...]:
    """Returns the messages of a row's task; () for a task without messages."""
    messages = task.options.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return ()
    return tuple(message_from_openai(message) for message in messages)


def _check_messages(messages: Sequence[JSON], label: str) -> None:
    parsed = []
    for index, value in enumerate(messages):
        try:
            parsed.append(message_from_openai(value, f"message {index}"))
        except AgentGymError as error:
            raise ConfigError(f"{label}: {error}") from error
        for call in parsed[-1].tool_calls:
            if isinstance(call, MalformedCall):
                raise ConfigError(f"{label}: message {index} has a tool call that cannot be read: {call.error}")
    if parsed[-1].role == "assistant":
        raise ConfigError(f"{label} ends with the assistant's own message; a prompt ends with what it is to answer")
    if not any(message.content.strip() for message in parsed):
        raise ConfigError(f"{label} holds messages without text")


def _without_null_fields(message: JSON) -> JSON:
    if not isinstance(message, Mapping):
        return message
    return {"content": None} | {key: value for key, value in message.items() if value is not None}


def _holds(value: object) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)
