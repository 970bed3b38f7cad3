"""The text of a sampled reply to a message: reasoning, content, calls, and calls that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from agentgym.types import JSON, AnyCall, MalformedCall, Message, ToolCall

__all__ = ["Piece", "parse_reply", "read_call", "reply_problem"]

THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
REPLY_MARKS = (THINK, END_THINK, CALL, END_CALL)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a reply: text, or one mark (`is_mark`)."""

    text: str
    is_mark: bool = False


def parse_reply(pieces: Iterable[Piece], *, in_reasoning: bool = False) -> Message:
    """The message of a Hermes or Qwen reply; never raises, takes time linear in the reply.

    `in_reasoning` says that the generation prompt already opened the reasoning. Rules:

    - A call inside reasoning is not a call. Reasoning that is never closed takes everything: the content is empty,
      and when it holds a call, one MalformedCall from the first call on says so.
    - A `</think>` that nothing opened closes reasoning which began with the reply.
    - A call that the reply's end leaves open is read if its JSON is complete, else malformed; a call that another
      call interrupts is malformed.
    - Without calls the content is the text as it is; with calls it is the stripped texts around them, one a line.
    """
    scan = _Scan(in_reasoning)
    for piece in pieces:
        scan.take(piece)
    return scan.finish()


def reply_problem(message: Message) -> str | None:
    """One sentence to tell the model about a reply that neither says nor calls anything, else None."""
    if message.content.strip() or message.tool_calls:
        return None
    if message.reasoning:
        return "Your reply held only reasoning. Close it with </think>, then answer or call a tool."
    return "Your reply was empty. Answer or call a tool."


def read_call(body: str, call_id: str, raw: str) -> AnyCall:
    """The call that `body` spells as JSON, or a MalformedCall whose error the model can act on.

    `arguments` may be an object, a string that holds one, or absent (no arguments).
    """
    try:
        value = _loads(body)
        if not isinstance(value, dict):
            raise ValueError(f"a call is a JSON object, got {_kind(value)}")
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError('a call needs a "name" that is a non-empty string')
        arguments = value.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f'"arguments" is a JSON object, got {_kind(arguments)}')
        return ToolCall(call_id, name, arguments)
    except ValueError as error:
        wanted = '{"name": "tool", "arguments": {...}}'
        return MalformedCall(call_id, raw, f"the call could not be read: {error}. Write {wanted}")


@dataclass
class _Scan:
    in_reasoning: bool
    reasonings: list[str] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=lambda: [[]])
    """Content before, between and after the calls, each in parts."""
    calls: list[tuple[str, str, bool]] = field(default_factory=list)
    """Body, raw text, and whether the call was ended properly or by the reply's end."""
    current: list[str] = field(default_factory=list)
    in_call: bool = False
    everything: list[str] = field(default_factory=list)
    first_call: int | None = None
    """Where in `everything` the first call mark of the reasoning at hand stands."""

    def take(self, piece: Piece) -> None:
        self.everything.append(piece.text)
        if not piece.is_mark:
            self.current.append(piece.text)
        elif self.in_reasoning:
            self._in_reasoning(piece.text)
        elif self.in_call:
            self._in_call(piece.text)
        else:
            self._in_content(piece.text)

    def _in_reasoning(self, mark: str) -> None:
        if mark == END_THINK:
            self.reasonings.append(self._flush().strip("\n"))
            self.in_reasoning, self.first_call = False, None
            return
        if mark == CALL and self.first_call is None:
            self.first_call = len(self.everything) - 1
        if mark != THINK or self.current:  # an opening right after the opening says nothing new
            self.current.append(mark)

    def _in_call(self, mark: str) -> None:
        if mark == END_CALL:
            self._end_call(closed=True, complete=True)
        elif mark == CALL:
            self._end_call(closed=False, complete=False)
            self.in_call = True
        else:
            self.current.append(mark)

    def _in_content(self, mark: str) -> None:
        if mark == THINK:
            self.texts[-1].append(self._flush())
            self.in_reasoning = True
        elif mark == CALL:
            self.texts[-1].append(self._flush())
            self.texts.append([])
            self.in_call = True
        elif mark == END_THINK and not self.reasonings:
            self.reasonings.append("".join(self.everything[:-1]).strip("\n"))
            self.texts, self.calls, self.current = [[]], [], []
        else:
            self.current.append(mark)

    def _end_call(self, *, closed: bool, complete: bool) -> None:
        body = self._flush()
        self.calls.append((body, CALL + body + (END_CALL if closed else ""), complete))
        self.in_call = False

    def _flush(self) -> str:
        text = "".join(self.current)
        self.current.clear()
        return text

    def finish(self) -> Message:
        if self.in_reasoning:
            return self._unclosed()
        if self.in_call:
            self._end_call(closed=False, complete=True)
        self.texts[-1].append(self._flush())
        calls = tuple(self._read(index, *call) for index, call in enumerate(self.calls))
        return Message("assistant", self._content(), self._reasoning(), calls)

    @staticmethod
    def _read(index: int, body: str, raw: str, complete: bool) -> AnyCall:
        if not complete:
            return MalformedCall(f"call_{index}", raw, f"the call was not closed with {END_CALL} before the next one")
        return read_call(body, f"call_{index}", raw)

    def _content(self) -> str:
        first, *later = ["".join(parts) for parts in self.texts]
        first = first.lstrip("\n") if self.reasonings else first
        if not self.calls:
            return first
        texts = [first.rstrip(), *(text.strip() for text in later)]
        return "\n".join(filter(None, texts))

    def _reasoning(self) -> str | None:
        return "\n".join(filter(None, self.reasonings)) or None

    def _unclosed(self) -> Message:
        first = self.first_call
        self.reasonings.append(self._flush().strip("\n"))
        problem = f"the call stands inside reasoning that was never closed; write {END_THINK} before calling"
        calls: list[AnyCall] = [self._read(index, *call) for index, call in enumerate(self.calls)]
        if first is not None:
            calls.append(MalformedCall(f"call_{len(calls)}", "".join(self.everything[first:]), problem))
        return Message("assistant", "", self._reasoning(), tuple(calls))


def _loads(text: str) -> JSON:
    """JSON without what JSON does not have (NaN, infinities, lone surrogates); ValueError says what is wrong."""
    try:
        value: JSON = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({error.msg} at character {error.pos})") from None
    except UnicodeEncodeError:
        raise ValueError("invalid JSON (a lone surrogate)") from None
    except RecursionError:
        raise ValueError("invalid JSON (nested too deeply)") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"invalid JSON ({name} is not JSON)")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"invalid JSON (the number {text[:20]} is too large)")
    return value


def _kind(value: JSON) -> str:
    if isinstance(value, str):
        return "a string"
    return "null" if value is None else "a list" if isinstance(value, Sequence) else f"the value {value!r}"[:40]
