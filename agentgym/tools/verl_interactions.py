"""Interactions of verl: an `interaction_config_path` file, whose classes answer each reply as a user would.

verl's `BaseInteraction`: `start_interaction(instance_id, **kwargs)` begins an episode with the row's
`extra_info.interaction_kwargs`, whose `name` chooses the class. `generate_response(instance_id, messages, **kwargs)`
answers a reply without a call: whether the episode ends, a text, a score and further values. `finalize_interaction`
ends it. All are coroutines; a class needs only `generate_response`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from agentgym.errors import ConfigError, EnvironmentFault, UnknownName, nearest
from agentgym.loading import Wanted, load_named
from agentgym.openai_wire import message_to_openai
from agentgym.tools.calling.definition import Tool
from agentgym.tools.calling.worker import run_sync
from agentgym.types import Message

__all__ = ["BaseInteraction", "VerlInteraction", "settle", "verl_class", "verl_interactions"]

CLASS = Wanted(noun="interaction class", example="Class", hint="verl's own classes need verl, or a copy of the file.")
SUFFIX = "Interaction"
KWARGS = "interaction_kwargs"
_INSTANCES = count()


class BaseInteraction:
    """The base of an interaction's class where verl is not installed; its file imports it from here."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.name = str(config.get("name", "interaction_agent"))

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str | None:
        """Begins an episode."""
        return instance_id

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Returns the score of a reply."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Ends the episode."""


class VerlInteraction:
    """The interaction of one episode: a source without tools, which answers replies by one of `classes`."""

    def __init__(self, classes: Mapping[str, Callable[[], Any]]) -> None:
        self._classes = classes
        self._user: Any = None
        self._instance: str | None = None
        self._kwargs: dict[str, Any] = {}
        self._messages: list[dict[str, Any]] = []
        self.reply: Message | None = None
        """The reply that is being played, which `note` adds to the conversation."""
        self.reward = 0.0
        """The scores of replies since it was read last."""

    def open(self) -> list[Tool]:
        """Returns no tools."""
        return []

    def close(self) -> None:
        """Ends an episode that did not come to its end."""
        if self._instance is not None:
            run_sync(self.finish())

    def begin(self, row: Mapping[str, Any]) -> None:
        """Takes the interaction that a row names; raises ConfigError for a row that names none of the file."""
        extra = row.get("extra_info")
        settings = extra.get(KWARGS) if isinstance(extra, Mapping) else None
        names = ", ".join(self._classes)
        if not isinstance(settings, Mapping) or not settings.get("name"):
            raise ConfigError(f"the row names no interaction: extra_info.{KWARGS}.name is one of {names}")
        if settings["name"] not in self._classes:
            near = nearest(str(settings["name"]), self._classes) or "."
            raise UnknownName(f"the row names the interaction {settings['name']!r}, which is not in {names}{near}")
        self._user, self._kwargs = self._classes[settings["name"]](), dict(settings)
        self._messages = []

    @property
    def has_begun(self) -> bool:
        """True in an episode of a row."""
        return self._user is not None

    def note(self, messages: Sequence[Message]) -> None:
        """Adds the reply and what follows it to the conversation that `generate_response` is given."""
        reply, self.reply = self.reply, None
        new_messages = messages if reply is None else [reply, *messages]
        self._messages += [{**message_to_openai(message), "content": message.content} for message in new_messages]

    async def respond(self) -> tuple[bool, str]:
        """Returns whether the episode ends, and the answer to the last reply; its score is added to `reward`."""
        if self._instance is None:
            self._instance = f"agentgym-{next(_INSTANCES)}"
            if hasattr(self._user, "start_interaction"):
                instance = await settle(self._user.start_interaction(self._instance, **self._kwargs))
                self._instance = instance if isinstance(instance, str) else self._instance
        self.note(())
        messages = [dict(message) for message in self._messages]
        answer = await settle(self._user.generate_response(self._instance, messages, **self._kwargs))
        if not isinstance(answer, tuple | list) or len(answer) < 3 or not isinstance(answer[1], str):
            raise EnvironmentFault(
                f"{type(self._user).__name__}.generate_response returns (ends, text, score, values), got {answer!r:.80}"
            )
        self.reward += float(answer[2] or 0.0)
        return bool(answer[0]), answer[1]

    async def finish(self) -> float:
        """Ends the episode; it has no further reward."""
        instance, self._instance = self._instance, None
        if instance is not None and hasattr(self._user, "finalize_interaction"):
            takes = inspect.signature(self._user.finalize_interaction).parameters
            await settle(self._user.finalize_interaction(*([instance] if takes else [])))
        return 0.0


def verl_interactions(path: Path, entries: object) -> Callable[[], VerlInteraction]:
    """Returns the source of a file's `interaction` list; raises ConfigError for another one, or an unknown class."""
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{str(path)!r}: `interaction` is a list of objects with class_name, got {entries!r:.80}")
    classes: dict[str, Callable[[], Any]] = {}
    for number, entry in enumerate(entries):
        where = f"{str(path)!r}, interaction {number}"
        class_name, kind, entry = verl_class(where, entry, "generate_response", CLASS)
        simple = class_name.replace(":", ".").rpartition(".")[2]
        name = str(entry.get("name") or (simple.removesuffix(SUFFIX) or simple).lower())
        if name in classes:
            raise ConfigError(f"{where}: the name {name!r} is taken by another one")
        classes[name] = partial(kind, {**(entry.get("config") or {}), "name": name})
    return partial(VerlInteraction, classes)


def verl_class(where: str, entry: object, method: str, expectation: Wanted) -> tuple[str, Any, Mapping[str, Any]]:
    """Returns the class name of an entry of verl's files, the class, and the entry.

    Raises ConfigError for an entry without a class that has `method`; `where` names the entry.
    """
    name = entry.get("class_name") if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or not isinstance(name, str):
        raise ConfigError(f"{where}: an object with class_name was wanted, got {entry!r:.80}")
    kind: Any = load_named(name if ":" in name else ":".join(name.rsplit(".", 1)), expectation)
    if not callable(kind) or not hasattr(kind, method):
        raise ConfigError(f"{where}: {name!r} is not a class with a method {method}")
    return name, kind, entry


async def settle(value: Any) -> Any:
    """Returns a value, or the result of an awaitable one."""
    return await value if inspect.isawaitable(value) else value
