"""Encodes a reply that the model did not sample as the ids that it would have to sample in that conversation."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentgym.chat_templates.formats.schema_types import kinds_of
from agentgym.chat_templates.renderers.template_probe import PROBE
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import RenderError
from agentgym.types import JSON, AnyCall, MalformedCall, Message, ToolCall, ToolSpec

__all__ = ["encode_written_reply"]

_NEXT = Message("user", "?")


def encode_written_reply(
    renderer: TemplateRenderer, history: Sequence[Message], reply: Message, tools: Sequence[ToolSpec] = ()
) -> list[int]:
    """Returns the ids of `reply` after `renderer.render(history, tools)`, the end token included.

    They are the text that the template puts after that prompt if the reply is the conversation's last message. If the
    template writes such a conversation without what the prompt has (a system prompt that moves, reasoning that the
    prompt opens or leaves out), they are the text after the prompt of a single question. Reasoning that the template
    has no place for is left out. Raises RenderError if the template writes the reply elsewhere, or so that it does not
    read back as it is: with other calls or arguments, or without its text. The arguments of a tool that is not in
    `tools` are read by their own types.
    """
    guard = renderer.guard_for([*history, reply], tools)
    prompt = renderer.text(history, tools, guard=guard)
    text = _text_after_prompt(renderer, history, reply, tools, guard)
    if text is None:
        text = _text_after_prompt(renderer, [_NEXT], reply, tools, guard)
    if text is None:
        raise RenderError(
            f"the chat template does not continue its prompt with the reply; the prompt ends {prompt[-30:]!r}"
        )
    prompt_ids = renderer.marks.encode(prompt, guard)
    ids = _cut_after_end(renderer, prompt_ids, renderer.marks.encode(text, guard), reply)
    all_tools = [*tools, *_stand_in_tools(reply.tool_calls, tools)]
    _check_read(renderer, reply, renderer.parse(ids, all_tools, prompt_ids))
    return ids


def _text_after_prompt(
    renderer: TemplateRenderer, history: Sequence[Message], reply: Message, tools: Sequence[ToolSpec], guard: str
) -> str | None:
    """Returns the reply's text after its prompt, and what the template puts there; None if it is written elsewhere."""

    def text_with(last: Message) -> str:
        return renderer.text([*history, last], tools, guard=guard, generation_prompt=False)

    prompt, whole = renderer.text(history, tools, guard=guard), text_with(reply)
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    think, end_think = map(re.escape, renderer.thinking)
    if think and (
        closed := re.search(rf"{think}\s*{end_think}\s*\Z", prompt)
    ):  # the prompt has empty reasoning already
        if reply.reasoning:
            raise RenderError(
                f"the prompt leaves reasoning out (it ends {prompt[-30:]!r}), and the reply has some;"
                " take that out of the messages"
            )
        if not whole.startswith(prompt[: closed.start()]):
            return None
        return re.sub(rf"\A(?:{think})?\s*{end_think}\s*", "", whole[closed.start() :])
    if not think or reply.reasoning:
        return None
    whole = text_with(replace(reply, reasoning=PROBE))  # the prompt opens reasoning: it is closed with nothing in it
    return whole[len(prompt) :].replace(PROBE, "", 1) if whole.startswith(prompt) else None


def _cut_after_end(renderer: TemplateRenderer, prompt: Sequence[int], ids: list[int], reply: Message) -> list[int]:
    """Returns the reply's ids up to its first end token.

    If a template ends a reply with the next message's beginning, `extend` gives that token.
    """
    stop = _first_stop(renderer, ids)
    if stop is None:
        call = next((call for call in reply.tool_calls if isinstance(call, ToolCall)), None)
        answer = _NEXT if call is None else Message("tool", "?", tool_call_id=call.id, name=call.name)
        ids = ids + renderer.extend([*prompt, *ids], [answer])
        stop = _first_stop(renderer, ids)
    elif rest := renderer.decode([index for index in ids[stop + 1 :] if index not in renderer.marks.texts]).strip():
        raise RenderError(f"the chat template ends the reply before all of it is rendered: {rest[:40]!r} follows it")
    if stop is None:
        raise RenderError("the chat template puts no end token after a reply")
    return ids[: stop + 1]


def _first_stop(renderer: TemplateRenderer, ids: Sequence[int]) -> int | None:
    return next((at for at, index in enumerate(ids) if index in renderer.stop_ids), None)


def _check_read(renderer: TemplateRenderer, reply: Message, reading: Message) -> None:
    """Raises RenderError if the ids parse into something else than the reply."""
    names_written = [getattr(call, "name", "") for call in reply.tool_calls]
    names_read = [getattr(call, "name", "") for call in reading.tool_calls]
    unread = next((call.error for call in reading.tool_calls if isinstance(call, MalformedCall)), "")
    if names_read != names_written or unread:
        lost = "calls" if len(names_written) < 2 or not names_read else "further calls"
        why = unread or renderer.drops.get(lost) or renderer.drops.get("calls with text") or renderer.unread
        raise RenderError(
            f"the chat template renders calls of {', '.join(names_written) or 'no tool'} so that "
            f"{', '.join(names_read) or 'none'} is read{f': {why}' if why else ''}"
        )
    for written, got in zip(reply.tool_calls, reading.tool_calls, strict=True):
        if isinstance(written, ToolCall) and isinstance(got, ToolCall):
            _check_arguments(renderer, written, got)
    if _words(reading.content) != _words(reply.content):
        why = renderer.drops.get("text with calls") or f"{reading.content[:40]!r} is read"
        raise RenderError(f"the chat template renders the reply {reply.content[:40]!r} otherwise: {why}")


def _check_arguments(renderer: TemplateRenderer, written: ToolCall, got: ToolCall) -> None:
    """Raises RenderError if the template renders a call so that it is read with other arguments."""
    spellings_written, spellings_read = _spellings(written.arguments), _spellings(got.arguments)
    if spellings_written == spellings_read:
        return
    why = renderer.drops.get("arguments")
    raise RenderError(
        f"the chat template renders the call of {written.name} with {_differences(spellings_written, spellings_read)} "
        f"so that {_differences(spellings_read, spellings_written)} is read{f': {why}' if why else ''}"
    )


def _differences(arguments: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Returns the arguments that the others lack, or have with another value, for a message."""
    texts = [f"{key} = {text:.80}" for key, text in arguments.items() if others.get(key) != text]
    return ", ".join(texts) or "no such argument"


def _spellings(arguments: Mapping[str, JSON]) -> dict[str, str]:
    """Returns the arguments as texts, equal for values that are equal in JSON (5.0 is 5), composed as `_words` are."""
    plain = json.loads(json.dumps(arguments, default=dict), parse_float=lambda text: _number(float(text)))
    texts = {key: json.dumps(value, ensure_ascii=False, sort_keys=True) for key, value in plain.items()}
    return {unicodedata.normalize("NFC", key): unicodedata.normalize("NFC", text) for key, text in texts.items()}


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value


def _stand_in_tools(calls: Sequence[AnyCall], tools: Sequence[ToolSpec]) -> list[ToolSpec]:
    """Returns a tool for each name of a call that no tool has, with the types of the calls' arguments."""
    schemas: dict[str, dict[str, JSON]] = {}
    for call in calls:
        if isinstance(call, ToolCall) and call.name not in [tool.name for tool in tools]:
            types = {key: {"type": [*kinds_of(value)]} for key, value in call.arguments.items()}
            schemas[call.name] = {**types, **schemas.get(call.name, {})}
    return [ToolSpec(name, "", {"type": "object", "properties": schema}) for name, schema in schemas.items()]


def _words(text: str) -> str:
    """Returns the text without the white space that templates trim, composed as tokenizers compose it."""
    return "".join(unicodedata.normalize("NFC", text).split())
