"""Messages and tools in the form of OpenAI's chat completions, both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.errors import AgentGymError
from agentgym.types import JSON, AnyCall, MalformedCall, Message, Role, ToolCall, ToolSpec

__all__ = ["MALFORMED", "WireError", "message_from_openai", "message_to_openai", "tool_from_openai"]

MALFORMED = "malformed_call"
"""The name of a malformed call; its arguments are then `{"raw": ..., "error": ...}`, which any server reads."""
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class WireError(AgentGymError, ValueError):
    """A value that is not a message or a tool of chat completions; `param` is its path, as in `messages[2].content`."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (WireError, (str(self), self.param))


def message_to_openai(message: Message) -> dict[str, JSON]:
    """Returns the message in the form of chat completions; `message_from_openai` is the inverse.

    Reasoning goes into `reasoning_content`. The arguments of a call are JSON text. A malformed call, which has no
    name, goes as a call of `malformed_call` whose arguments hold the raw text and the error.
    """
    result: dict[str, JSON] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["content"] = message.content or None
        result["tool_calls"] = [_call_to_openai(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def message_from_openai(value: object, where: str = "message") -> Message:
    """Returns the message that a client sent or a server answered with; WireError names the place that is invalid.

    Content may be null, or a list of text parts. A call whose arguments are no JSON object becomes a MalformedCall,
    with the call as received as its raw text; a call without an id gets one. Fields that are not part of the
    conversation (`name`, `refusal`) are ignored.
    """
    if not isinstance(value, Mapping):
        raise WireError(f"{where} is an object with a role and a content, got {_kind(value)}", where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise WireError(f"{where}.role is one of {', '.join(_ROLES)}, got {role!r}", f"{where}.role")
    if value.get("function_call") is not None:
        raise WireError(f"{where}.function_call is not supported: use tool_calls", f"{where}.function_call")
    calls = _list(value.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise WireError(f"{where}.tool_calls: only an assistant message calls tools", f"{where}.tool_calls")
    call_id = value.get("tool_call_id") if role == "tool" else None
    if role == "tool" and not isinstance(call_id, str):
        raise WireError(f"{where}.tool_call_id names the call that is answered, got {call_id!r}", where)
    reasoning = value.get("reasoning_content", value.get("reasoning")) if role == "assistant" else None
    return Message(
        _ROLES[role],
        _text(value.get("content"), f"{where}.content"),
        reasoning if isinstance(reasoning, str) else None,
        tuple(_call_from_openai(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        call_id if isinstance(call_id, str) else None,
    )


def tool_from_openai(value: object, where: str = "tool") -> ToolSpec:
    """Returns the tool of `{"type": "function", "function": {...}}`, the inverse of `ToolSpec.to_openai`.

    Raises WireError.
    """
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        wanted = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
        raise WireError(f"{where} is {wanted}, got {str(value)[:80]}", where)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise WireError(f"{where}.function.parameters is a JSON Schema object, got {_kind(parameters)}", where)
    return ToolSpec(function["name"], str(function.get("description") or ""), parameters)


def _call_to_openai(call: AnyCall) -> dict[str, JSON]:
    if isinstance(call, MalformedCall):
        fields: dict[str, JSON] = {
            "raw": call.raw,
            "error": call.error,
            **({"truncated": True} if call.truncated else {}),
        }
        name, arguments = MALFORMED, json.dumps(fields, ensure_ascii=False)
    else:
        name, arguments = call.name, json.dumps(call.arguments, ensure_ascii=False, default=dict)
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_from_openai(value: object, where: str) -> AnyCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping):
        raise WireError(f'{where} is {{"id": ..., "type": "function", "function": {{...}}}}, got {_kind(value)}', where)
    call_id, name, text = str(value.get("id") or where), function.get("name"), function.get("arguments")
    try:
        if not isinstance(name, str) or not name:
            raise ValueError('a call needs a "name" that is a non-empty string')
        arguments = _arguments(text)
    except ValueError as error:
        return MalformedCall(call_id, json.dumps({"name": name, "arguments": text}, ensure_ascii=False), str(error))
    raw, error_text = arguments.get("raw"), arguments.get("error")
    if name == MALFORMED and isinstance(raw, str) and isinstance(error_text, str):
        return MalformedCall(call_id, raw, error_text, arguments.get("truncated") is True)
    return ToolCall(call_id, name, arguments)


def _arguments(text: object) -> dict[str, Any]:
    """Returns the object that the text of a call's arguments spells; ValueError describes what is wrong."""
    if isinstance(text, Mapping):  # some servers send the object itself
        return dict(text)
    if text is None or text == "":
        return {}
    try:
        value = json.loads(text, parse_constant=_no_constant) if isinstance(text, str) else text
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"the arguments are invalid JSON ({error.msg} at character {error.pos})") from None
    except UnicodeEncodeError:
        raise ValueError("the arguments are invalid JSON (a lone surrogate)") from None
    except RecursionError:
        raise ValueError("the arguments are invalid JSON (nested too deeply)") from None
    if not isinstance(value, dict):
        raise ValueError(f"the arguments are a JSON object, got {_kind(value)}")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"the arguments are invalid JSON ({name} is not JSON)")


def _text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(_list(content, where)):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
            raise WireError(f"{where}[{index}] is a text part, got {kind!r}: only text is supported", where)
        texts.append(text)
    return "".join(texts)


def _list(value: object, where: str) -> Sequence[object]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise WireError(f"{where} is a list, got {_kind(value)}", where)
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
