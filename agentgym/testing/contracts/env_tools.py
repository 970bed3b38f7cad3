"""Checks of an environment's tools: schemas are valid, and enforced."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema

from agentgym.envs.base.action import Action
from agentgym.envs.base.policies import RandomPolicy
from agentgym.testing.contracts.env_subject import Check, Complaint, EnvUnderTest
from agentgym.testing.contracts.tool_watch import watched_tools
from agentgym.types import Message, ToolCall, ToolResult, ToolSpec

__all__ = ["TOOL_CHECKS"]

ODD_VALUES: tuple[Any, ...] = ("odd", -1.5, None, True, [[["odd"]]], {"odd": None}, 10**30)
DRAWS = 20
"""The number of tries to draw arguments that a schema accepts."""
SEEDS = range(4)


def _valid_schemas(make: EnvUnderTest) -> Iterator[Complaint]:
    specs = _specs(make)
    if not specs:
        yield "not claimed", "it has no tools"
    for spec in specs:
        if not spec.description:
            yield "warning", f"the tool {spec.name!r} has no description; write a docstring"
        try:
            jsonschema.Draft202012Validator.check_schema(dict(spec.parameters))
        except jsonschema.SchemaError as error:
            yield "error", f"the parameters of the tool {spec.name!r} are no JSON Schema: {error.message}"
            continue
        if spec.parameters.get("type") != "object":
            kind = spec.parameters.get("type")
            yield "error", f"the parameters of the tool {spec.name!r} are of type {kind!r}; they are an object"


def _honoured_schemas(make: EnvUnderTest) -> Iterator[Complaint]:
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
    """Yields arguments that the schema refuses."""
    schema: dict[str, Any] = dict(spec.parameters)
    validator = jsonschema.Draft202012Validator(schema)
    properties = schema.get("properties", {})
    tries: list[dict[str, Any]] = [{}, {"no_such_argument": 1}]
    tries += [{name: value} for name in properties for value in ODD_VALUES]
    yield from (arguments for arguments in tries if not validator.is_valid(arguments))


def _refusal(make: EnvUnderTest, call: ToolCall) -> str:
    """Returns what is wrong with the answer to a bad call; "" if it is refused as it should be."""
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


def _accepts(make: EnvUnderTest, spec: ToolSpec) -> Iterator[Complaint]:
    """Checks that a call that fits the schema is not refused."""
    env = make()
    observation, _ = env.reset(seed=0)
    policy = RandomPolicy()
    policy.reset(env, observation, 0)
    call = _valid_call(policy, spec, observation)
    if call is not None:
        answer = _answer(env.step(_calling(call))[4])
        if answer is not None and answer.error in ("invalid_arguments", "unknown_tool", "malformed"):
            yield "error", f"{spec.name}({dict(call.arguments)}) fits its schema, and is refused: {answer.content[:80]}"
    env.close()


def _valid_call(policy: RandomPolicy, spec: ToolSpec, observation: str) -> ToolCall | None:
    """Returns a call that fits its schema; None if none was drawn."""
    validator = jsonschema.Draft202012Validator(dict(spec.parameters))
    drawn = (policy.call(spec, observation) for _ in range(DRAWS))
    return next((call for call in drawn if validator.is_valid(call.arguments)), None)


def _raising_tools(make: EnvUnderTest) -> Iterator[Complaint]:
    """Calls each tool with arguments that fit its schema, in several episodes."""
    specs = _specs(make)
    if not specs:
        yield "not claimed", "it has no tools"
    for spec in specs:
        outcomes = [outcome for seed in SEEDS if (outcome := _call_outcome(make, spec, seed)) is not None]
        complaints = [complaint for _, complaint in outcomes if complaint]
        if complaints:
            yield "error", complaints[0]
        elif outcomes and all(error is not None for error, _ in outcomes):
            errors = "; ".join(dict.fromkeys(str(error) for error, _ in outcomes))
            yield (
                "warning",
                f"{spec.name} raised in each of {len(outcomes)} calls that fit its schema: {errors[:500]}",
            )


def _call_outcome(make: EnvUnderTest, spec: ToolSpec, seed: int) -> tuple[str | None, str] | None:
    """Returns what a call of the tool raised and what is wrong with that; None if no fitting call was drawn."""
    env = make()
    try:
        observation, _ = env.reset(seed=seed)
        policy = RandomPolicy()
        policy.reset(env, observation, seed)
        call = _valid_call(policy, spec, observation)
        if call is None:
            return None
        try:
            with watched_tools(env) as raised:
                env.step(_calling(call))
        except Exception as error:  # noqa: BLE001  # the boundary: an environment is user code
            return str(error), f"{spec.name}({dict(call.arguments)}): {error}"
        if not raised:
            return None, ""
        complaint = raised[-1].complaint(call.arguments)
        return (None if raised[-1].is_deliberate and not complaint else str(raised[-1])), complaint
    finally:
        env.close()


def _calling(call: ToolCall) -> Action:
    return Action.from_message(Message("assistant", "", tool_calls=(dataclasses.replace(call, id="check_0"),)))


def _answer(info: Mapping[str, Any]) -> ToolResult | None:
    results = [result for result in info.get("tool_results", ()) if isinstance(result, ToolResult)]
    return next((result for result in results if result.call_id == "check_0"), None)


def _specs(make: EnvUnderTest) -> tuple[ToolSpec, ...]:
    env = make()
    env.reset(seed=0)
    specs = env.tool_specs
    env.close()
    return specs


TOOL_CHECKS: dict[str, Check] = {
    "tool schemas": _valid_schemas,
    "arguments against the schema": _honoured_schemas,
    "raising tools": _raising_tools,
}
