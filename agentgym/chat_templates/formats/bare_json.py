"""Families whose calls are JSON without required marks: Llama 3, xLAM, Gemma 2, and models that a prompt asked to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentgym.call_json import ARGUMENT_KEYS, check_outside, read_json
from agentgym.chat_templates.formats.grammar import NAME, CallGrammar
from agentgym.chat_templates.formats.json_calls import JsonCalls
from agentgym.chat_templates.formats.json_text import json_span
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.reply import ReplyBuilder
from agentgym.chat_templates.formats.tagged import FoundCall, UnreadCall
from agentgym.types import JSON, Message

__all__ = ["BARE_JSON"]

THINK, END_THINK = THINKING = ("<think>", "</think>")
VALUE = re.compile(r"\[(?=\s*+\{\s*+\")|\{(?=\s*+\")")
"""Matches the place where a JSON object, or a list of them, may begin."""
STEP = re.compile(f"{re.escape(END_THINK)}|{VALUE.pattern}")
CALL_START = re.compile(r"[\[\s]*+\{\s*+\"(?:name|tool_calls?)\"\s*+:")
"""Matches the beginning of JSON that is meant as a call even if the rest of it cannot be read."""
MEANT_IN_REASONING = re.compile(r"\{\s*+\"name\"\s*+:")
FENCE, END_FENCE = re.compile(r"```\w*+\s*+\Z"), re.compile(r"\s*+```")
SEPARATORS = re.compile(r"[\s;,]*+")
ARGUMENTS = ("arguments", "parameters")


class BareCalls(JsonCalls):
    """Calls that may have the form of the OpenAI API: `{"type": "function", "function": {"name": ...}}`."""

    def call(self, value: JSON) -> FoundCall:
        """Returns the call that a JSON value is; raises ValueError that names what it lacks."""
        inner = unwrap_call(value)
        if inner is not value and isinstance(value, Mapping):
            check_outside(value)
        return super().call(inner)


@dataclass(frozen=True)
class BareFamily:
    """The details that one family adds to bare JSON."""

    name: str
    models: str
    marks: tuple[str, ...] = ()
    """The marks around calls, which are no content."""
    ends: tuple[str, ...] = ()
    write: str = '{"name": "tool", "arguments": {...}}'
    """An example of a call, for error messages."""
    calls_only: str = ""
    """The mark after which nothing but a call makes sense."""
    answers: bool = False
    """True if an answer may be JSON as well: `{"response": "It is sunny."}`."""
    grammar: CallGrammar | None = None

    def format(self) -> ReplyFormat:
        """Returns the family's format."""
        marks = (*THINKING, *self.marks)
        return ReplyFormat(self.name, self.models, self.read, marks, THINKING, self.ends, grammar=self.grammar)

    def read(self, text: str, context: ReplyContext) -> Message:
        """Returns the message of a reply.

        A JSON object with a name and arguments, or with a tool's name, is a call, wherever it is in the text, alone or
        in a list; other JSON is content, and so is all that it holds. JSON that begins like a call and cannot be read
        is malformed; if it breaks off, it takes the rest of the reply, because what follows may belong to its strings.
        """
        return _Scan(text, context, self).message()


class _Scan:
    def __init__(self, text: str, context: ReplyContext, family: BareFamily) -> None:
        self.text, self.context, self.family = text, context, family
        self.calls = BareCalls(listed=True, arguments=ARGUMENTS, write=family.write)
        self.reply = ReplyBuilder()
        self.is_fenced = False
        self.begin = 0
        """The offset of the text that was not read yet."""
        self.stray = 0
        """The offset of the next end of reasoning, if it is at this place or after it."""

    def message(self) -> Message:
        if self.context.in_reasoning or self.text.lstrip().startswith(THINK):
            self._reasoning()
        look = self.begin
        while (match := STEP.search(self.text, look)) is not None:
            look = self._end_reasoning(match.end()) if match[0] == END_THINK else self._value(match.start())
        self._rest(self.text[self.begin :])
        return self.reply.message()

    def _reasoning(self) -> None:
        """Reads the reasoning that the reply begins with; without an end it is all of the reply."""
        bare = self.text.lstrip()
        start = len(self.text) - len(bare) + len(THINK) if bare.startswith(THINK) else 0
        end = self.text.find(END_THINK, start)
        if end >= 0:
            self.reply.reason(self.text[start:end])
            self.begin = end + len(END_THINK)
            return
        self.reply.reason(self.text[start:])
        self.begin = len(self.text)
        call = MEANT_IN_REASONING.search(self.text, start)
        if call is not None:
            error = f"the call stands inside reasoning that was never closed; write {END_THINK} before calling"
            self.reply.add_malformed(self.text[call.start() :], error)

    def _end_reasoning(self, end: int) -> int:
        """Makes reasoning of all before the first end that nothing opened; returns where to continue the search."""
        if not self.reply.reasonings:
            self.reply.forget()
            self.reply.reason(self.text[: end - len(END_THINK)])
            self.begin, self.is_fenced = end, False
        return end

    def _next_stray(self, start: int) -> int:
        """Returns the offset of the next end of reasoning that nothing opened; else the text's end."""
        if self.reply.reasonings or self.stray < 0:
            return len(self.text)
        if self.stray <= start:
            self.stray = self.text.find(END_THINK, start)
        return self.stray if self.stray >= 0 else len(self.text)

    def _value(self, start: int) -> int:
        """Adds the calls of the JSON that begins at `start`, if any; returns where to continue the search."""
        end, is_whole = json_span(self.text, start)
        try:
            calls = self._read(self.text[start:end])
        except ValueError as error:
            is_cut = not is_whole and end == len(self.text)
            end = end if is_whole else self._next_stray(start)
            self._before_call(start)
            self.reply.add_malformed(
                self.text[start:end],
                f"the call could not be read: {error}. Write {self.family.write}",
                truncated=is_cut,
            )
            return self._after_call(end)
        if calls is None:
            return end if is_whole else min(end, self._next_stray(start))
        self._before_call(start)
        for call in calls:
            if isinstance(call, FoundCall):
                self.reply.call(call.name, call.arguments, call.id)
            else:
                self.reply.add_malformed(call.raw, f"the call could not be read: {call.error}")
        return self._after_call(end)

    def _read(self, raw: str) -> Sequence[FoundCall | UnreadCall] | None:
        """Returns the calls of JSON, or None if it is something else; raises ValueError if it is meant as a call."""
        try:
            value = read_json(raw)
        except ValueError:
            if CALL_START.match(raw) is None:
                return None
            raise
        if self.family.answers and isinstance(value, Mapping) and value.keys() == {"response"}:
            self._answer(value["response"], raw)
            return None
        calls, body = calls_of(value, raw)
        names = [tool.name for tool in self.context.tools]
        if not any(is_meant(call, names) for call in (calls if isinstance(calls, list) else [calls])):
            return None
        return self.calls.of(calls, body)

    def _answer(self, answer: JSON, raw: str) -> None:
        if self.text.strip() == raw:
            self.reply.text(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))
            self.begin = len(self.text)

    def _before_call(self, start: int) -> None:
        before = self.text[self.begin : start]
        fence = FENCE.search(before)
        if fence is not None:
            self.is_fenced, before = True, before[: fence.start()]
        self._content(before)

    def _after_call(self, end: int) -> int:
        fence = END_FENCE.match(self.text, end) if self.is_fenced else None
        if fence is not None:
            self.is_fenced, end = False, fence.end()
        self.begin = end
        return end

    def _rest(self, rest: str) -> None:
        """Reads what follows the last call."""
        mark = self.family.calls_only
        if self.reply.calls or not mark or mark not in rest:
            self._content(rest)
            return
        before, mark, after = rest.partition(mark)
        self._content(before)
        error = f"no JSON call stands behind {mark}. Write {self.family.write}"
        self.reply.add_malformed(mark + after, error, truncated=json_span(after, 0) == (len(after), False))

    def _content(self, text: str) -> None:
        for mark in self.family.marks:
            text = text.replace(mark, "")
        if not self.reply.calls or not SEPARATORS.fullmatch(text):
            self.reply.text(text)


def calls_of(value: JSON, raw: str) -> tuple[JSON, str]:
    """Returns the part of a JSON value that holds the calls, of `{"tool_calls": [...]}` or all of it, and its text."""
    if isinstance(value, Mapping):
        for key in ("tool_calls", "tool_call"):
            inner = value.get(key)
            if isinstance(inner, list | dict):
                return inner, json.dumps(inner, ensure_ascii=False)
    return value, raw


def unwrap_call(value: JSON) -> JSON:
    """Returns the call inside the form of the OpenAI API, or the value itself."""
    inner = value.get("function") if isinstance(value, Mapping) and "name" not in value else None
    return inner if isinstance(inner, Mapping) else value


def is_meant(value: JSON, names: Sequence[str]) -> bool:
    """Returns True if a JSON value is meant as a call: it has the name of a tool, or a name and arguments."""
    inner = unwrap_call(value)
    if not isinstance(value, Mapping) or not isinstance(inner, Mapping) or "name" not in inner:
        return False
    fields = {**value, **inner}
    if fields["name"] in names or any(key in fields for key in ARGUMENTS):
        return True
    return any(isinstance(fields.get(key), dict) for key in ARGUMENT_KEYS)  # under a wrong key


BARE_JSON = tuple(
    family.format()
    for family in (
        BareFamily(
            "llama3_json",
            "Llama 3.1 to 3.3",
            marks=("<|python_tag|>",),
            ends=("<|eot_id|>", "<|eom_id|>"),
            write='{"name": "tool", "parameters": {...}}',
            calls_only="<|python_tag|>",
            grammar=CallGrammar('{"name": "', f'{{"name": "{NAME}", "parameters": ', "}"),
        ),
        BareFamily("plain_json", "any model that was told to answer with JSON"),
        BareFamily(
            "xlam",
            "xLAM 1 and 2",
            marks=("[TOOL_CALLS]", "<tool_call>", "</tool_call>"),
            ends=("<|eot_id|>", "<|im_end|>"),
            write='[{"name": "tool", "arguments": {...}}]',
        ),
        BareFamily("gemma2_generic", "Gemma 2, told to answer with JSON", ends=("<end_of_turn>",), answers=True),
    )
)
