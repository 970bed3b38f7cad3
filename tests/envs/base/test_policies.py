"""The random policy follows every schema; missing policies are named."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NotRequired, TypedDict

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.envs import POLICIES, Policy, TextEnv, ToolEnv, policy_for
from agentgym.errors import ConfigError, UnknownName
from agentgym.tools import register_tool
from agentgym.tools.calling.schema import type_schema
from agentgym.types import Message, ToolCall


class Way(enum.Enum):
    NORTH = "north"
    SOUTH = "south"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


@dataclasses.dataclass
class Tree:
    value: int
    children: list[Tree] = dataclasses.field(default_factory=list)


class Options(TypedDict):
    fast: bool
    note: NotRequired[str]


class Plain(ToolEnv):
    runs_inline = True

    def start(self, options: dict[str, Any]) -> str:
        return "The key 42 is in room 7."


PROPERTIES = {
    "way": type_schema(Way),
    "point": type_schema(Point),
    "options": type_schema(list[Options]),
    "pair": type_schema(tuple[int, str]),
    "some": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "maybe": type_schema(int | None),
    "mixed": {"type": ["integer", "null"]},
    "fixed": {"const": 3},
    "number": {"type": "number", "minimum": 2, "maximum": 3},
    "count": {"type": "integer", "minimum": 5, "maximum": 6},
    "open": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8},
    "flag": {"type": "boolean"},
    "tree": {"$ref": "#/$defs/Tree"},
}
SCHEMA: dict[str, Any] = {
    "name": "act",
    "parameters": {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
    | {"$defs": type_schema(Tree)["$defs"], "additionalProperties": False},
}


@given(st.integers(0, 2**32), st.text())
def test_random_calls_are_valid(seed: int, observation: str) -> None:
    env = Plain(tools=[register_tool(SCHEMA, lambda **arguments: "ok")])
    policy = policy_for(env, "random")
    policy.reset(env, observation, seed)
    message = policy.act(observation)
    (call,) = message.tool_calls
    assert isinstance(call, ToolCall)
    assert list(jsonschema.Draft202012Validator(SCHEMA["parameters"]).iter_errors(call.arguments)) == []


def test_equal_seeds_act_equally() -> None:
    def acts(seed: int) -> list[Message]:
        env = Plain(tools=[register_tool(SCHEMA, lambda **arguments: "ok")])
        policy = policy_for(env, "random")
        policy.reset(env, "The key 42", seed)
        return [policy.act("The key 42") for _ in range(3)]

    assert acts(1) == acts(1)
    assert acts(1) != acts(2)


def test_without_tools_the_random_policy_says_a_word_of_the_observation() -> None:
    policy = policy_for(Plain(), "random")
    policy.reset(Plain(), "lamp", 0)
    assert policy.act("lamp") == Message("assistant", "lamp")
    assert policy.act("") == Message("assistant", "help")


def test_a_missing_policy_is_a_taught_error() -> None:
    with pytest.raises(ConfigError, match=r"Plain has no oracle policy; give it a method make_oracle"):
        policy_for(Plain(), "oracle")
    with pytest.raises(UnknownName, match="did you mean 'oracle'"):
        policy_for(Plain(), "oracel")

    class Wrong(Plain):
        def make_oracle(self) -> object:
            return 3

    with pytest.raises(ConfigError, match="gave a int, not a Policy"):
        policy_for(Wrong(), "oracle")


def test_a_policy_may_be_added() -> None:
    class Silent:
        def reset(self, env: TextEnv, observation: str, seed: int) -> None:
            pass

        def act(self, observation: str) -> Message:
            return Message("assistant", "")

    assert isinstance(Silent(), Policy)
    POLICIES.add("silent", lambda env: Silent())
    assert isinstance(policy_for(Plain(), "silent"), Silent)
