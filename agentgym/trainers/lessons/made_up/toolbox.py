"""Made-up tools and parameters, whose names differ within a conversation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentgym.trainers.lessons.made_up.values import Values
from agentgym.trainers.lessons.made_up.writing import write_facts
from agentgym.types import JSON, Message, ToolCall, ToolSpec

__all__ = ["Dialogue", "Parameter", "Toolbox"]

TYPES = (*("string",) * 5, *("integer",) * 4, "number", "boolean", "enum", "array")
NAME = re.compile(r"[A-Za-z_]\w*")
OPTIONAL_SHARE = 0.1
LONG_SHARE = 0.05
"""The share of conversations with a long text that is of no use: a model has to look far back in them."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a tool: its name, the type of its values, and for the type `enum` the choices."""

    name: str
    type: str
    choices: tuple[str, ...] = ()

    @property
    def schema(self) -> Mapping[str, JSON]:
        """The JSON Schema of the values."""
        return {"type": "string", "enum": list(self.choices)} if self.type == "enum" else {"type": self.type}


@dataclass
class Dialogue:
    """A conversation with its tools, as it grows."""

    tools: list[ToolSpec]
    messages: list[Message]
    mistakes: set[int] = field(default_factory=set)
    """The indices of replies that are shown and not learned."""
    kind: str = ""
    """The function that made it up."""

    def call(self, results: Sequence[str], *calls: tuple[str, Mapping[str, JSON]], is_mistake: bool = False) -> None:
        """Adds a reply with these calls, each a tool and its arguments, and their results."""
        first = sum(len(message.tool_calls) for message in self.messages)
        numbered = tuple(ToolCall(f"c{first + n}", tool, arguments) for n, (tool, arguments) in enumerate(calls))
        if is_mistake:
            self.mistakes.add(len(self.messages))
        self.messages.append(Message("assistant", "", tool_calls=numbered))
        for call, result in zip(numbered, results, strict=True):
            self.messages.append(Message("tool", result, tool_call_id=call.id, name=call.name))

    def end(self, reply: str | None) -> None:
        """Ends with a reply, or with the last call: results that are answered by nothing are left out."""
        if reply is not None:
            self.messages.append(Message("assistant", reply))
        while self.messages[-1].role == "tool":
            self.messages.pop()


class Toolbox:
    """Makes the tools, parameters and opening messages of one conversation."""

    def __init__(self, values: Values, *, is_easy: bool = False) -> None:
        self.values, self.is_easy = values, is_easy
        self._names: set[str] = set()

    def new_name(self, draw: Callable[[], str]) -> str:
        """Returns what `draw` returns, once it is an identifier that is not in use."""
        for attempt in range(100):
            name = draw() if attempt < 50 else draw() + self.values.letters("abcxyz", 1, 3)
            if name not in self._names and NAME.fullmatch(name):
                self._names.add(name)
                return name
        return self.new_name(lambda: self.values.letters("abcdefghij", 8, 8))

    def tool_name(self) -> str:
        """Returns a new name of a tool."""
        return self.new_name(self.values.tool_name)

    def parameter(self) -> Parameter:
        """Returns a parameter of any type."""
        kind, words = self.values.pick(TYPES), self.values.word
        choices = tuple(dict.fromkeys(words() for _ in range(self.values.between(2, 4)))) if kind == "enum" else ()
        return Parameter(self.new_name(self.values.label), kind, choices)

    def parameters(self, low: int, high: int) -> list[Parameter]:
        """Returns `low` to `high` parameters."""
        return [self.parameter() for _ in range(self.values.between(low, high))]

    def value(self, parameter: Parameter) -> JSON:
        """Returns a value that the parameter's schema allows."""
        return self.values.pick(parameter.choices) if parameter.choices else self.values.of_type(parameter.type)

    def arguments(self, parameters: Sequence[Parameter]) -> dict[str, JSON]:
        """Returns a value for each parameter."""
        return {parameter.name: self.value(parameter) for parameter in parameters}

    def tool(self, name: str, parameters: Sequence[Parameter]) -> ToolSpec:
        """Returns the schema of a tool, some of whose parameters are optional."""
        required: list[JSON] = [p.name for p in parameters if not self.values.chance(OPTIONAL_SHARE)]
        properties: dict[str, JSON] = {parameter.name: dict(parameter.schema) for parameter in parameters}
        schema: dict[str, JSON] = {"type": "object", "properties": properties, "required": required}
        return ToolSpec(name, self.values.sentence(), schema)

    def with_others(self, tools: Sequence[ToolSpec], most: int) -> list[ToolSpec]:
        """Returns the tools and up to `most` that are not used, in a random order."""
        most = min(most, 1) if self.is_easy else most
        others = [self.tool(self.tool_name(), self.parameters(0, 3)) for _ in range(self.values.between(0, most))]
        return self.values.sample([*tools, *others], len(tools) + len(others))

    def facts(self, low: int, high: int) -> dict[str, JSON]:
        """Returns `low` to `high` named values that nothing asks for."""
        types = ("string", "integer", "number")
        names = [self.new_name(self.values.label) for _ in range(self.values.between(low, high))]
        return {name: self.values.of_type(self.values.pick(types)) for name in names}

    def result(self) -> str:
        """Returns a result that nothing depends on."""
        return write_facts(self.values, self.facts(0, 2))

    def open(self, tools: Sequence[ToolSpec], text: str, system: str | None = None) -> Dialogue:
        """Returns a dialogue that begins with the user's text, after a system prompt or none."""
        values = self.values
        if system is None:
            system = values.sentence(2, 8) if values.chance(0.4) else ""
        if not self.is_easy and values.chance(LONG_SHARE):
            long = " ".join(values.sentence(4, 12) for _ in range(values.between(8, 70)))
            text = "\n".join(values.sample((long, text), 2))
        opening = [Message("system", system)] if system else []
        return Dialogue(list(tools), [*opening, Message("user", text)])
