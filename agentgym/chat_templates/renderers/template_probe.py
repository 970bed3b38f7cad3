"""Measures what a chat template does to a conversation that goes on, by rendering small ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentgym.errors import RenderError
from agentgym.types import Message, Role, ToolCall, ToolSpec

__all__ = [
    "CALLING",
    "PLAIN_CALL",
    "PROBE",
    "TOOL",
    "USER",
    "begins_each_result",
    "call_refusal_of",
    "drops_of",
    "dummy_replies",
    "ends_calls_alone",
    "names_by_id",
    "probe_tools_of",
    "refusals_of",
    "reply_text",
    "result_needs_of",
    "rewrites_of",
    "shared_start",
    "takes_nameless",
    "unread_because",
    "written_arguments",
]

PROBE = "Qv7reply"
USER = Message("user", "Hello there.")
_WHERE = {"where": {"type": "string", "description": "Where to."}, "n": {"type": "array", "description": "How."}}
TOOL = ToolSpec("look", "Looks around.", {"type": "object", "properties": _WHERE})
CALLING = Message("assistant", "", tool_calls=(ToolCall("000000000", "look", {"where": "é <b>", "n": [1, 2]}),))
PLAIN_CALL = Message("assistant", "", tool_calls=(ToolCall("000000000", "look", {"n": [1, 2]}),))
"""A call that every notation of calls can write."""

_RESULT = Message("tool", "North: a door.", tool_call_id="000000000", name="look")
_AGAIN = Message("assistant", "", tool_calls=(ToolCall("000000001", "look", {"where": "é <b>", "n": [1, 2]}),))
_NEXT_RESULT = Message("tool", "North: a door.", tool_call_id="000000001", name="look")
"""A call and its result after those of `CALLING`: no two calls of a conversation have the same id."""
_MORE = Message("user", "Go on.")
_LOOKS_AHEAD = re.compile(
    r"loop\.(?:last|nextitem|revindex|length)|\[-1\]|\[::-1\]|\blast_|messages\s*\|\s*length|loop\.index0? *[+>]"
)
_REMEMBERS = re.compile(r"namespace\(|\bns\.|loop\.(?:index|first)|_idx\b|_seen\b")


class Probed(Protocol):
    """The parts of a renderer that are needed to measure its template."""

    keeps_what_was_shown: bool
    probe_tools: tuple[ToolSpec, ...]

    @property
    def source(self) -> str:
        """The template's source."""

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        guard: str = "",
        generation_prompt: bool = True,
    ) -> str:
        """Returns the template's text."""

    def after_reply(
        self,
        new_messages: Sequence[Message],
        history: Sequence[Message] = (),
        tools: Sequence[ToolSpec] | None = None,
        guard: str = "",
    ) -> str:
        """Returns what the template puts after a reply."""


def shared_start(text: str, other: str) -> str:
    """Returns the longest text that both begin with."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[low:middle] == other[low:middle] else (low, middle - 1)
    return text[:low]


def reply_text(prompt: str, whole: str) -> tuple[str, bool]:
    """Returns the text of the reply to a `prompt` that asks `USER`, and whether it goes on from all of that.

    The template may move or rewrite what precedes the question once it is answered.
    """
    shared = shared_start(prompt, whole)
    question_start, tail = prompt.find(USER.content, len(shared)), prompt.rpartition(USER.content)[2]
    if question_start >= 0 and whole.count(USER.content + tail) == 1:
        return whole.partition(USER.content + tail)[2], True
    shared = re.sub(r"<[^>]*\Z", "", shared)  # not half of two different marks
    return whole.removeprefix(shared), shared == prompt


def dummy_replies(new_messages: Sequence[Message]) -> Iterator[Message]:
    """Yields replies for `new_messages` to follow, with `PROBE` where a template may show it: the likeliest first.

    Results follow a reply with a call for each, of its id and name. A template that takes one call per reply, or none,
    gets such a reply: then that is what precedes the results in the real conversation as well.
    """
    answered = [message for message in new_messages if message.role == "tool"]
    ids = [message.tool_call_id or f"{number:09d}" for number, message in enumerate(answered)]
    silent = tuple(
        ToolCall(call_id, message.name or TOOL.name, {"where": "here"})
        for call_id, message in zip(ids, answered, strict=True)
    )
    if silent:
        telling = tuple(ToolCall(call.id, call.name, {"where": PROBE}) for call in silent)
        yield Message("assistant", "", tool_calls=(*silent[:-1], telling[-1]))
        yield Message("assistant", PROBE, tool_calls=silent)
        if len(silent) > 1:
            yield Message("assistant", "", tool_calls=telling[:1])
            yield Message("assistant", PROBE, tool_calls=silent[:1])
    yield Message("assistant", PROBE)


def refusals_of(chat: Probed) -> dict[str, str]:
    """Returns the reason for each role whose message cannot be appended exactly."""
    refusals: dict[str, str] = {}
    roles: tuple[Role, ...] = ("user", "tool", "system")
    for role in roles:
        message = _NEXT_RESULT if role == "tool" else Message(role, _NEXT_RESULT.content)
        try:
            problem = _difference(chat, message)
        except RenderError as error:
            problem = str(error)
        if problem:
            refusals[role] = f"a {role} message cannot be appended exactly after a reply: {problem}"
    return refusals


def rewrites_of(chat: Probed) -> tuple[str, ...]:
    """Returns sentences on how a longer conversation's text differs from that of a shorter one that it continues."""
    return tuple(dict.fromkeys(sentence for sentence in (_rewrite(chat, case) for case in _CASES) if sentence))


def drops_of(chat: Probed) -> dict[str, str]:
    """Returns what the template leaves out, mapped to a sentence about it."""
    drops: dict[str, str] = {}
    tool = ToolSpec("Qv7tool", TOOL.description, TOOL.parameters)
    calls = tuple(ToolCall(f"{n:09d}", TOOL.name, {"where": f"Qv7place{n}"}) for n in range(2))
    results = tuple(Message("tool", "A door.", tool_call_id=call.id, name=call.name) for call in calls)
    text_shown = _try_text(chat, [USER], [tool])
    if text_shown is not None and tool.name not in text_shown:
        drops["tools"] = f"the chat template shows no tools ({_lines(chat.source, 'tools')})"
    for number, kind in ((1, "calls"), (2, "further calls")):
        reply = Message("assistant", "", tool_calls=calls[:number])
        text_shown = _try_text(chat, [USER, reply, *results[:number]], (TOOL,))
        text_shown = text_shown or _try_text(chat, [USER, reply, _MORE], (TOOL,))
        if text_shown is not None and f"Qv7place{number - 1}" not in text_shown:
            drops[kind] = f"the chat template leaves {kind} of a reply out ({_lines(chat.source, 'tool_calls')})"
            break
    thought = Message("assistant", PROBE, "Qv7thought", _CALLS)
    text_shown = _try_text(chat, [USER, thought, _RESULT], (TOOL,))
    for text, kind, sign in ((PROBE, "text with calls", "tool_calls"), ("Qv7thought", "reasoning", "reason|think")):
        if text_shown is not None and text not in text_shown:
            drops[kind] = f"the chat template leaves {kind} out ({_lines(chat.source, sign)})"
    reply_with_call = replace(thought, reasoning=None, tool_calls=calls[:1])
    text_shown = _try_text(chat, [USER, reply_with_call, results[0]], (TOOL,))
    if "calls" not in drops and text_shown is not None and PROBE in text_shown and "Qv7place0" not in text_shown:
        lines = _lines(chat.source, "tool_calls")
        drops["calls with text"] = f"the chat template leaves calls out where a reply has text as well ({lines})"
    return drops


def written_arguments(chat: Probed) -> str:
    """Returns a sentence for a template whose arguments cannot be read back though its calls can be."""
    lines = _lines(chat.source, "arguments|parameters")
    return f"the chat template writes arguments of calls so that they cannot be read back ({lines})"


def result_needs_of(chat: Probed) -> frozenset[str]:
    """Returns those of `name` and `tool_call_id` that the template writes around a tool message."""
    others = {"name": replace(_RESULT, name="stare"), "tool_call_id": replace(_RESULT, tool_call_id="999999999")}
    try:
        expected = chat.after_reply([_RESULT], (USER,))
        return frozenset(need for need, other in others.items() if chat.after_reply([other], (USER,)) != expected)
    except RenderError:
        return frozenset()


def probe_tools_of(chat: Probed) -> tuple[ToolSpec, ...]:
    """Returns the tools to measure the template with: none, unless it requires some."""
    try:
        chat.text([USER])
    except RenderError:
        chat.text([USER], (TOOL,))
        return (TOOL,)
    return ()


def begins_each_result(chat: Probed, mark: str) -> bool:
    """Returns True if the template puts the mark between two results of one reply."""
    results = [Message("tool", f"Qv7result{n}", tool_call_id=f"{n:09d}", name=TOOL.name) for n in range(2)]
    try:
        text = chat.after_reply(results)
    except RenderError:
        return False
    return mark in text.partition(results[0].content)[2].partition(results[1].content)[0]


def ends_calls_alone(chat: Probed, call_end: str, end: str) -> bool:
    """Returns True if `call_end` ends the calls of a reply, and not the reply: if no result follows, `end` does."""
    calling = Message("assistant", "", tool_calls=(ToolCall("000000000", TOOL.name, {"where": PROBE}),))
    text = _try_text(chat, [USER, calling, USER], chat.probe_tools)
    if text is None or call_end == end:
        return False
    _, mark, behind = text.partition(PROBE)[2].partition(USER.content)[0].partition(call_end)
    return bool(mark) and end in behind


def names_by_id(chat: Probed) -> bool:
    """Returns True if the template names a result whose call it does not find by the call's id."""
    unknown = Message("tool", "A door.", tool_call_id="Qv7unfound")
    result_variants = (unknown, replace(unknown, name="Qv7unfound"), replace(unknown, name="Qv7other"))
    talk = [USER, Message("assistant", PROBE)]
    bare, same, other = [_try_text(chat, [*talk, result], chat.probe_tools) for result in result_variants]
    return bare is not None and bare == same != other


def takes_nameless(chat: Probed) -> bool:
    """Returns True if the template has a word for a tool that a result does not name, and does not look up its call."""
    try:
        return chat.after_reply([replace(_RESULT, name=None)], (USER,)) != chat.after_reply([_RESULT], (USER,))
    except RenderError:
        return False


def call_refusal_of(chat: Probed) -> str:
    """Returns why the template refuses every reply with calls if there are tools; empty if it takes one."""
    refusal = ""
    for following in ([], [_RESULT]):
        try:
            chat.text([USER, CALLING, *following], (TOOL,))
        except RenderError as error:
            refusal = refusal or str(error)
        else:
            return ""
    return refusal


def unread_because(chat: Probed, end: str, format_name: str) -> str:
    """Returns why calls cannot be read.

    It is that the template refuses them, puts the `end` of a reply before them, or writes another form than the format.
    """
    if _ends_before_call(chat, end):
        return f"its chat template writes the end of a reply, {end!r}, before the calls of one; use no tools"
    return call_refusal_of(chat) or (
        f"what its chat template writes is not read by the format {format_name!r}: name its family"
        " (`agentgym tools families` shows all), or use no tools"
    )


def _ends_before_call(chat: Probed, end: str) -> bool:
    prompt, whole = (_try_text(chat, messages, (TOOL,)) for messages in ([USER], [USER, CALLING, _RESULT]))
    if prompt is None or whole is None or not whole.startswith(prompt):
        return False
    return end in whole.removeprefix(prompt).partition(TOOL.name)[0]


def _try_text(chat: Probed, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | None:
    """Returns the template's text, or None if it refuses."""
    try:
        return chat.text(messages, tools)
    except RenderError:
        return None


def _difference(chat: Probed, new: Message) -> str | None:
    """Returns how the text around a reply depends on the history or on the new message, or None."""
    expected = chat.after_reply([new], (USER,))
    histories = () if chat.keeps_what_was_shown else (*_HISTORIES, *_LOOPS)
    for history in histories:
        for tools in ((), (TOOL,)):
            try:
                prompts = [chat.text(history, tools, generation_prompt=begins) for begins in (True, False)]
                after = chat.after_reply([new], history, tools)
            except RenderError:
                continue  # the template refuses a system message, tools or their lack: no conversation has them
            if after != expected:
                lines = _lines(chat.source, _REMEMBERS)
                return f"what the template puts there depends on what came before ({lines})"
            if history in _LOOPS:
                continue  # here it may rewrite replies, which stay as sampled
            whole = chat.text([*history, next(dummy_replies([new])), new], tools)
            if not whole.startswith(shared_start(*prompts)):
                pattern = f"['\"]{new.role}['\"]" if new.role == "system" else _LOOKS_AHEAD
                return f"the template rewrites what came before the reply ({_lines(chat.source, pattern)})"
    escaped = new.content in expected or new.content.strip() in expected
    return None if escaped else f"the template drops it ({_lines(chat.source, new.role)})"


def _rewrite(chat: Probed, case: _Case) -> str | None:
    """Returns what happens to a prompt and its reply when more follows, or None if they stay."""
    name, history, reply, new = case.name, case.history, case.reply, case.new
    tools = (TOOL,) if reply.tool_calls or len(history) > 1 else chat.probe_tools
    try:
        prompt = chat.text(history, tools)
        alone = chat.text([*history, reply], tools, generation_prompt=False)
        whole = chat.text([*history, reply, *new], tools)
    except RenderError:
        return None
    lines = _lines(chat.source, _LOOKS_AHEAD)
    shared = shared_start(prompt, whole)
    if shared != prompt:
        was, became = prompt[len(shared) :][:40], whole[len(shared) :][:40]
        return f"after {name}, {became!r} is in place of {was!r} of the prompt ({lines})"
    gone = reply.reasoning and reply.reasoning in alone and reply.reasoning not in whole
    return f"after {name}, the reasoning is gone ({lines})" if gone else None


def _lines(source: str, pattern: str | re.Pattern[str]) -> str:
    """Returns the template's lines that match, for people: `lines 5, 9`."""
    numbers = [str(number) for number, line in enumerate(source.split("\n"), 1) if re.search(pattern, line)]
    if not numbers:
        return "no line of it names them"
    more = " and more" if len(numbers) > 8 else ""
    return f"see its line{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:8])}{more}"


@dataclass(frozen=True)
class _Case:
    """A conversation that goes on."""

    name: str
    history: Sequence[Message]
    reply: Message
    new: Sequence[Message]


_TALK = [USER, Message("assistant", "Hi."), _MORE]
_PLAY = [USER, CALLING, _RESULT]
_HISTORIES: tuple[Sequence[Message], ...] = ([USER], _TALK, [Message("system", "Be brief."), *_TALK])
_LOOPS: tuple[Sequence[Message], ...] = (_PLAY, [*_PLAY, Message("assistant", "A door."), _MORE])
_CALLS = CALLING.tool_calls
_CASES = (
    _Case("a reply", [USER], Message("assistant", PROBE), [_MORE]),
    _Case("a reply with reasoning", [USER], Message("assistant", PROBE, "Qv7thought"), [_MORE]),
    _Case("a call", [USER], CALLING, [_RESULT]),
    _Case("a call with reasoning", [USER], Message("assistant", "", "Qv7thought", _CALLS), [_RESULT]),
    _Case("a call with text", [USER], Message("assistant", PROBE, None, _CALLS), [_RESULT]),
    _Case("a result", _PLAY, _AGAIN, [_NEXT_RESULT]),
    _Case("a result and a later question", _PLAY, Message("assistant", PROBE, "Qv7thought"), [_MORE]),
)
