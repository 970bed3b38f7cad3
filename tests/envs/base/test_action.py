"""Actions are text that carries its calls."""

from __future__ import annotations

import copy
import pickle

from agentgym.envs import Action
from agentgym.tools import read_calls
from agentgym.types import MalformedCall, Message, ToolCall

REPLY = Message(
    "assistant", "so: é", tool_calls=(ToolCall("call_0", "go", {"way": "n"}), MalformedCall("b", "{", "no"))
)


def test_an_action_is_its_text() -> None:
    action = Action("hello")
    assert action == "hello"
    assert (action.tool_calls, action.message) == ((), None)


def test_an_action_survives_pickling_and_copying_with_its_calls() -> None:
    action = Action.from_message(REPLY)
    for duplicate in (pickle.loads(pickle.dumps(action)), copy.deepcopy(action)):
        assert (duplicate, duplicate.tool_calls, duplicate.message) == (action, REPLY.tool_calls, REPLY)


def test_the_text_of_an_action_spells_its_calls_out() -> None:
    action = Action.from_message(REPLY)
    first, second = read_calls(str(action), {})
    assert first == REPLY.tool_calls[0]
    assert isinstance(second, MalformedCall)
    assert action.startswith("so: é\n")
