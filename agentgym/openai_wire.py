"""Messages and tools in the form of OpenAI's chat completions, both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.call_json import ARGUMENT_KEYS, as_call, check_outside
from agentgym.errors import AgentGymError
from agentgym.types import JSON, AnyCall, MalformedCall, Message, Role, ToolCall, ToolSpec

__all__ = [
    "MALFORMED",
    "REASONING",
    "WireError",
    "is_thought",
    "message_from_openai",
    "message_to_openai",
    "reasoning_texts",
    "tool_from_openai",
    "tool_schema",
]

REASONING = tuple(
    "reasoning_content reasoning thinking reasoning_details thinking_blocks reasoning_text reasoningContent "
    "thinking_content chain_of_thought thought thoughts".split()
)
"""The names under which servers and data sets keep the reasoning of a reply; the first is the one that we write."""
_TEXTS = ("text", "thinking", "reasoning", "content", "summary")
"""The keys of a part of reasoning that may hold its text, or parts with text."""
_CIPHER_KEYS = ("data", "signature", "encrypted_content")
"""The keys of a part of reasoning that only its server can read."""
_OTHER_SCHEMAS = (
    *(key for key in ARGUMENT_KEYS if key != "parameters"),
    *"schema properties json_schema args_schema parameter_definitions parametersJsonSchema".split(),
    *"inputSchema input_schema".split(),
)
"""The keys under which tools of other libraries have their schema; the last two count within a function alone."""
MALFORMED = "malformed_call"
"""The name of a malformed call; its arguments are then `{"raw": ..., "error": ...}`, which any server reads."""
_PLAIN = frozenset(("role", "content", "tool_calls"))
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

    Content may be null, or a list of text parts. A call that cannot be read (`as_call`) becomes a MalformedCall,
    with the call as received as its raw text; a call without an id gets one. Reasoning is read under any of its usual
    names, see `reasoning_texts`; two different texts, or none that can be read, are an error. Fields that are not part
    of the conversation (`name`, `refusal`) are ignored.
    """
    if not isinstance(value, Mapping):
        raise WireError(f"{where} is an object with a role and a content, got {_kind(value)}", where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise WireError(f"{where}.role is one of {', '.join(_ROLES)}, got {role!r}", f"{where}.role")
    if other := next((key for key in ("function_call", "tool_call", "toolCalls") if value.get(key) is not None), None):
        raise WireError(f"{where}.{other} is not supported: use tool_calls", f"{where}.{other}")
    calls = _list(value.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise WireError(f"{where}.tool_calls: only an assistant message calls tools", f"{where}.tool_calls")
    call_id = value.get("tool_call_id") if role == "tool" else None
    if role == "tool" and not isinstance(call_id, str):
        raise WireError(f"{where}.tool_call_id names the call that is answered, got {call_id!r}", where)
    content, is_reply = value.get("content"), role == "assistant"
    is_plain = isinstance(content, str) and value.keys() <= _PLAIN  # as most are, and the search for reasoning is slow
    return Message(
        _ROLES[role],
        _text(content, f"{where}.content", skip_thoughts=is_reply),
        _reasoning(value, where) if is_reply and not is_plain else None,
        tuple(_call_from_openai(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        call_id if isinstance(call_id, str) else None,
    )


def reasoning_texts(message: Mapping[str, object]) -> dict[str, str | None]:
    """Returns the reasoning of a reply, or of a piece of its stream, by the field that holds it.

    The fields are those of `REASONING`, in the message or in what LangChain and LiteLLM put beside, each a text, a part
    with text or a list of them, and `content`, if it has parts of the type `thinking` or `reasoning`. The text is None
    if it cannot be read, as that of encrypted reasoning.
    """
    content = message.get("content")
    thoughts = list(filter(is_thought, content)) if isinstance(content, list | tuple) else None
    inner = (message.get(key) for key in ("additional_kwargs", "provider_specific_fields"))
    holders = [message, *(holder for holder in inner if isinstance(holder, Mapping))]
    fields = {name: max((holder.get(name) for holder in holders), key=bool) for name in REASONING}
    fields["content"] = thoughts
    return {name: _thought_text(value) for name, value in fields.items() if value or value == ""}


def is_thought(part: object) -> bool:
    """Returns True for a part of a content that is reasoning, and no text of the reply."""
    kind = str(part.get("type")) if isinstance(part, Mapping) else ""
    return (isinstance(part, Mapping) and part.get("thought") is True) or "thinking" in kind or "reasoning" in kind


def tool_from_openai(value: object, where: str = "tool") -> ToolSpec:
    """Returns the tool of `{"type": "function", "function": {...}}`, the inverse of `ToolSpec.to_openai`.

    The forms of MCP, Anthropic and Bedrock are read too: a name and a description beside `inputSchema` or
    `input_schema`. Raises WireError.
    """
    function = value.get("function", value.get("toolSpec")) if isinstance(value, Mapping) else None
    if function is None and isinstance(value, Mapping) and tool_schema(value) is not None:
        function = value
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        form = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
        raise WireError(f"{where} is {form}, got {str(value)[:80]}", where)
    schema = tool_schema(function)
    fields = {**value, **function} if isinstance(value, Mapping) else function
    other = next((key for key in _OTHER_SCHEMAS if fields.get(key) and isinstance(fields[key], Mapping)), None)
    if not schema and other is not None:
        raise WireError(f"{where} has its schema under {other!r}: write it under 'parameters'", where)
    parameters = schema or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise WireError(f"{where}.function.parameters is a JSON Schema object, got {_kind(parameters)}", where)
    return ToolSpec(function["name"], str(function.get("description") or ""), parameters)


def tool_schema(tool: Mapping[str, Any]) -> object:
    """Returns the schema of a tool under the key of OpenAI, MCP, Anthropic or Bedrock; None if it has none."""
    schemas = [tool[key] for key in ("parameters", "inputSchema", "input_schema") if tool.get(key) is not None]
    schema = max(schemas, key=bool, default=None)
    return schema["json"] if isinstance(schema, Mapping) and schema.keys() == {"json"} else schema


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
    call_id = str(value.get("id") or where)
    try:
        check_outside(value)
        name, arguments = as_call(function)
    except ValueError as error:
        return MalformedCall(call_id, json.dumps(function, ensure_ascii=False, default=str), str(error))
    raw, error_text = arguments.get("raw"), arguments.get("error")
    if name == MALFORMED and isinstance(raw, str) and isinstance(error_text, str):
        return MalformedCall(call_id, raw, error_text, arguments.get("truncated") is True)
    return ToolCall(call_id, name, dict(arguments))


def _reasoning(message: Mapping[str, object], where: str) -> str | None:
    """Returns the one reasoning of a reply, which several fields may hold; they may differ in white space."""
    texts = reasoning_texts(message)
    full = {name: text for name, text in texts.items() if text and text.strip()}
    if len({"".join(text.split()) for text in full.values()}) > 1:
        names = " and ".join(full)
        raise WireError(f"{where} has different reasoning in {names}: keep the one that is meant", where)
    sealed = [f"{where}.{name}" for name, text in texts.items() if text is None]
    if sealed and not full:
        advice = f"encrypted reasoning has none. Write it as text in {REASONING[0]}, or remove the field"
        raise WireError(f"{sealed[0]} holds no text of reasoning that can be read; {advice}", sealed[0])
    return next(iter((full or texts).values()), None)


def _thought_text(value: object, levels: int = 6) -> str | None:
    """Returns the text of reasoning, a text or parts with text; None if there is only what cannot be read.

    Parts in parts are read to a depth of `levels`.
    """
    if isinstance(value, str):
        return value
    if levels and isinstance(value, list | tuple):
        parts = [_thought_text(part, levels - 1) for part in value]
        return None if None in parts and not any(parts) else "".join(part or "" for part in parts)
    if not levels or not isinstance(value, Mapping):
        return None
    texts = [_thought_text(value[key], levels - 1) for key in _TEXTS if value.get(key) is not None]
    is_empty = "" in texts and not any(value.get(key) for key in _CIPHER_KEYS)
    return next(filter(None, texts), "" if is_empty else None)


def _text(content: object, where: str, *, skip_thoughts: bool) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(_list(content, where)):
        if skip_thoughts and is_thought(part):
            continue
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
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
