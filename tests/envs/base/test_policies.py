"""The random policy follows every schema; missing policies are named."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NotRequired, TypedDict

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.envs import POLICIES, Action, Policy, Script, ScriptedPolicy, TextEnv, ToolEnv, policy_for
from agentgym.errors import ConfigError, UnknownName
from agentgym.tools import register_tool, tool
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


def test_without_tools_the_random_policy_replies_with_a_word_of_the_observation() -> None:
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


class Orders(ToolEnv):
    """Pays back what an order cost."""

    max_turns = 6
    runs_inline = True

    def start(self, options: dict[str, Any]) -> str:
        self.order, self.amount = (int(number) for number in self.np_random.integers(10, 100, 2))
        return f"Refund order {self.order}."

    @tool
    def look_up(self, order: int) -> str:
        """Tells what an order cost."""
        return f"It cost {self.amount if order == self.order else 0}"

    @tool
    def refund(self, order: int, amount: int) -> str:
        """Pays back."""
        is_right = (order, amount) == (self.order, self.amount)
        self.end(success=is_right, reward=float(is_right))
        return "Done."

    def make_oracle(self) -> Policy:
        return ScriptedPolicy(self.solve)

    def solve(self, observation: str) -> Script:
        yield "I look it up."
        answer = yield "look_up", {"order": self.order}
        amount = int(answer.rpartition(" ")[2])
        yield Message("assistant", "", tool_calls=(ToolCall("x", "refund", {"order": self.order, "amount": amount}),))


def test_a_script_yields_replies_and_is_sent_their_answers() -> None:
    env = Orders()
    observation, _ = env.reset(seed=3)
    policy = policy_for(env, "oracle")
    for _ in range(2):
        policy.reset(env, observation, 0)
        over = False
        while not over:
            observation, reward, over, _, info = env.step(Action.from_message(policy.act(observation)))
        assert (reward, info["metrics"]["success"], info["metrics"]["turns"]) == (1.0, 1.0, 3.0)
        observation, _ = env.reset(seed=4)


def test_a_script_that_ends_before_its_episode_is_an_error() -> None:
    env = Orders()
    observation, _ = env.reset(seed=3)
    policy = ScriptedPolicy(env.solve)
    policy.reset(env, observation, 0)
    for answer in (observation, "Nothing was done.", "It cost 5"):
        policy.act(answer)
    ended = r"Orders\.solve ended after reply 3, and the episode goes on: nothing has ended it \(self\.end\)"
    with pytest.raises(ConfigError, match=ended):
        policy.act("Not that much.")


def test_what_a_script_returns_or_cannot_write_as_json_is_named() -> None:
    def returns(observation: str) -> Script:
        yield "I look it up."
        return "refund", {}  # type: ignore[return-value]

    def of_numpy(observation: str) -> Script:
        yield "look_up", {"order": np.int64(7)}  # type: ignore[misc]

    env = Orders()
    observation, _ = env.reset(seed=3)
    policy = ScriptedPolicy(returns)
    policy.reset(env, observation, 0)
    policy.act(observation)
    with pytest.raises(ConfigError, match="it returned a value: yield it"):
        policy.act(observation)
    policy = ScriptedPolicy(of_numpy)
    policy.reset(env, observation, 0)
    with pytest.raises(ConfigError, match=r"arguments that are no JSON: .*int64.*int\(\.\.\.\)"):
        policy.act(observation)


def test_a_script_goes_on_where_another_player_moved() -> None:
    env = Orders()
    observation, _ = env.reset(seed=3)
    policy = ScriptedPolicy(env.solve)
    policy.reset(env, observation, 0)
    assert policy.act(observation).content == "I look it up."
    policy.watch("Nothing was done.")
    policy.watch("It cost 0")  # to somebody else's call
    call = policy.act("It cost 0").tool_calls[0]
    assert isinstance(call, ToolCall) and call.name == "look_up"
    call = policy.act("It cost 42").tool_calls[0]
    assert isinstance(call, ToolCall) and call.arguments == {"order": env.order, "amount": 42}
