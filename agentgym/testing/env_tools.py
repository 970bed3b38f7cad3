"""Checks of an environment's tools: schemas that are valid, and honoured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema

from agentgym.envs.action import Action
from agentgym.envs.policies import RandomPolicy
from agentgym.testing.env_subject import Check, Complaint, Subject
from agentgym.types import Message, ToolCall, ToolResult, ToolSpec

__all__ = ["TOOL_CHECKS"]

ODD_VALUES: tuple[Any, ...] = ("odd", -1.5, None, True, [[["odd"]]], {"odd": None}, 10**30)
DRAWS = 2000


def _valid_schemas(make: Subject) -> Iterator[Complaint]:
    specs = _specs(make)
    if not specs:
        yield "not claimed", "it has no tools"
    for spec in specs:
        try:
            jsonschema.Draft202012Validator.check_schema(dict(spec.parameters))
        except jsonschema.SchemaError as error:
            yield "error", f"the parameters of the tool {spec.name!r} are no JSON Schema: {error.message}"
            continue
        if spec.parameters.get("type") != "object":
            kind = spec.parameters.get("type")
            yield "error", f"the parameters of the tool {spec.name!r} are of type {kind!r}; they are an object"


def _honoured_schemas(make: Subject) -> Iterator[Complaint]:
    specs = _specs(make)
    if not specs:
        yield "not claimed", "it has no tools"
    for spec in specs:
        for arguments in _against(spec):
            complaint = _refusal(make, ToolCall("check_0", spec.name, arguments))
            if complaint:
                yield "error", f"{spec.name}({arguments}) is against its schema, and {complaint}"
                break
        else:
            yield from _accepts(make, spec)


def _against(spec: ToolSpec) -> Iterator[dict[str, Any]]:
    """Arguments that the schema refuses."""
    schema: dict[str, Any] = dict(spec.parameters)
    validator = jsonschema.Draft202012Validator(schema)
    properties = schema.get("properties", {})
    tries: list[dict[str, Any]] = [{}, {"no_such_argument": 1}]
    tries += [{name: value} for name in properties for value in ODD_VALUES]
    yield from (arguments for arguments in tries if not validator.is_valid(arguments))


def _refusal(make: Subject, call: ToolCall) -> str:
    """What is wrong with how a bad call is answered; "" when it is refused as it should be."""
    env = make()
    try:
        env.reset(seed=0)
        _, reward, _, _, info = env.step(_calling(call))
    except Exception as error:  # noqa: BLE001  # the boundary: an environment is user code
        return f"step raised {type(error).__name__}: {str(error)[:200]}; answer it with a tool result"
    finally:
        env.close()
    answer = _answer(info)
    if reward > 0:
        return f"pays {reward:g}"
    if answer is None:
        return "is answered by no tool result (info['tool_results'])"
    return "" if answer.error is not None else f"is run: {answer.content[:80]!r}; refuse it with ToolResult.error"


def _accepts(make: Subject, spec: ToolSpec) -> Iterator[Complaint]:
    """A call that fits the schema is no mistake of the caller."""
    env = make()
    observation, _ = env.reset(seed=0)
    policy = RandomPolicy()
    policy.reset(env, observation, 0)
    drawn = (call for _ in range(DRAWS) for call in policy.act(observation).tool_calls)
    call = next((one for one in drawn if isinstance(one, ToolCall) and one.name == spec.name), None)
    if call is not None and jsonschema.Draft202012Validator(dict(spec.parameters)).is_valid(call.arguments):
        answer = _answer(env.step(_calling(call))[4])
        if answer is not None and answer.error in ("invalid_arguments", "unknown_tool", "malformed"):
            yield "error", f"{spec.name}({dict(call.arguments)}) fits its schema, and is refused: {answer.content[:80]}"
    env.close()


def _calling(call: ToolCall) -> Action:
    return Action.from_message(Message("assistant", "", tool_calls=(dataclasses.replace(call, id="check_0"),)))


def _answer(info: Mapping[str, Any]) -> ToolResult | None:
    results = [one for one in info.get("tool_results", ()) if isinstance(one, ToolResult)]
    return next((one for one in results if one.call_id == "check_0"), None)


def _specs(make: Subject) -> tuple[ToolSpec, ...]:
    env = make()
    env.reset(seed=0)
    specs = env.tool_specs
    env.close()
    return specs


TOOL_CHECKS: dict[str, Check] = {
    "tool schemas": _valid_schemas,
    "arguments against the schema": _honoured_schemas,
}
