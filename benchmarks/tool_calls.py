"""The cost of one tool call: `python benchmarks/tool_calls.py`.

Checking arguments is compared with jsonschema alone and with compiling the validator for every call; a step of a
tool environment is compared with the bare function that its tool calls.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import jsonschema

from agentgym.envs import Action, ToolEnv
from agentgym.tools import as_tool, tool
from agentgym.types import Message, ToolCall


class Door(ToolEnv):
    """One tool that does next to nothing."""

    runs_inline = True

    def start(self, options: dict[str, Any]) -> str:
        return "A door."

    @tool
    def go(self, direction: str, steps: int = 1) -> str:
        """Goes."""
        return direction


class ThreadedDoor(Door):
    """The same, with its tool on the environment's own thread."""

    runs_inline = False


def microseconds(call: Callable[[], object], number: int) -> float:
    """Returns the best mean of five runs."""
    return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6


def main() -> None:
    """Prints the table."""
    arguments = {"direction": "north", "steps": 2}
    go_tool = as_tool(Door.go)
    schema = dict(go_tool.spec.parameters)
    validator = jsonschema.Draft202012Validator(schema)
    message = Message("assistant", "", tool_calls=(ToolCall("call_0", "go", arguments),))
    action = Action.from_message(message)
    inline, threaded = Door(), ThreadedDoor()
    inline.reset(seed=0)
    threaded.reset(seed=0)
    rows = [
        ("check: ours", microseconds(lambda: go_tool.check(arguments), 20_000)),
        ("check: jsonschema, compiled once", microseconds(lambda: validator.is_valid(arguments), 2_000)),
        ("check: jsonschema.validate", microseconds(lambda: jsonschema.validate(arguments, schema), 50)),
        ("step: inline", microseconds(lambda: inline.step(action), 5_000)),
        ("step: on its own thread", microseconds(lambda: threaded.step(action), 1_000)),
    ]
    threaded.close()
    base = {"check": rows[0][1], "step": rows[3][1]}
    print(f"{'':36}{'us':>10}{'ratio':>10}")
    for name, cost in rows:
        print(f"{name:36}{cost:10.1f}{cost / base[name.split(':')[0]]:10.1f}")


if __name__ == "__main__":
    main()
