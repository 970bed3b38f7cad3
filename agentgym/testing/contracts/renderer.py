"""`check_renderer`: tests a chat format, by using it, for the promises on which the rollout relies."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from agentgym.chat_templates.protocol import Renderer
from agentgym.types import Message, ToolCall, ToolSpec

__all__ = ["Check", "check_renderer"]

USER = Message("user", "Where are you?")
LOOK = ToolSpec("look", "Looks around.", {"type": "object", "properties": {"where": {"type": "string"}}})
CALL = ToolCall("call_0", "look", {"where": "north"})
RESULT = Message("tool", "A door.", tool_call_id="call_0", name="look")
REPLIES = {
    "text": Message("assistant", "In a cave."),
    "a call": Message("assistant", "", tool_calls=(CALL,)),
    "text and calls": Message("assistant", "I look.", tool_calls=(CALL, ToolCall("call_1", "look", {"where": "é <"}))),
}
MARK = re.compile(r"<\S+>|\[\S+\]")


@dataclass(frozen=True)
class Check:
    """One promise: `Check("a cut reply is ended", True, "")`."""

    name: str
    ok: bool
    detail: str
    """The observation that breaks the promise; an empty string if it holds."""


def check_renderer(renderer: Renderer, *, tools: bool = True) -> list[Check]:
    """Returns a check of every promise of `Renderer`; `tools=False` is for a model that calls none."""
    checks: list[Check] = []
    for name, check in CHECKS.items():
        if name in NEEDS_TOOLS and not tools:
            continue
        try:
            problem = next(check(renderer), "")
        except Exception as error:  # noqa: BLE001  # the boundary: a renderer is user code
            problem = f"raised {type(error).__name__}: {error}"
        checks.append(Check(name, not problem, problem))
    return checks


def ids_are_in_range(renderer: Renderer) -> Iterator[str]:
    ids = [*renderer.render([USER]), *renderer.stop_ids]
    if not renderer.stop_ids:
        yield "stop_ids is empty: no reply would ever end"
    if not all(0 <= index < renderer.vocab_size for index in ids):
        yield f"ids from {min(ids)} to {max(ids)} do not fit a vocabulary of {renderer.vocab_size}"


def contents_are_rendered(renderer: Renderer) -> Iterator[str]:
    text = renderer.decode(renderer.render([USER, REPLIES["text"], Message("user", "Why?")]))
    for content in (USER.content, REPLIES["text"].content, "Why?"):
        if content not in text:
            yield f"the rendered conversation lacks {content!r}: {text!r}"


def a_user_message_is_appended_as_rendered(renderer: Renderer) -> Iterator[str]:
    yield from _compare_extension(renderer, REPLIES["text"], [Message("user", "Why?")], ())


def a_tool_message_is_appended_as_rendered(renderer: Renderer) -> Iterator[str]:
    yield from _compare_extension(renderer, REPLIES["a call"], [RESULT], (LOOK,))
    answers = [RESULT, Message("tool", "A wall.", tool_call_id="call_1", name="look")]
    yield from _compare_extension(renderer, REPLIES["text and calls"], answers, (LOOK,))


def a_cut_reply_is_ended(renderer: Renderer) -> Iterator[str]:
    prompt = renderer.render([USER])
    ended = renderer.extend([*prompt, renderer.stop_ids[0]], [USER])
    cut = renderer.extend(prompt, [USER])
    missing = len(cut) - len(ended)
    if cut[missing:] != ended or not (missing > 0 or set(cut[:1]) & set(renderer.stop_ids)):
        yield f"after a cut reply comes {renderer.decode(cut)!r}, after an ended one {renderer.decode(ended)!r}"


def extending_does_not_read_the_history(renderer: Renderer) -> Iterator[str]:
    history = _Watched([*renderer.render([USER]) * 100, renderer.stop_ids[0]])
    renderer.extend(history, [USER])
    if history.reads > 100:
        yield f"extend read {history.reads} ids of {len(history)}: its cost grows with the history"


def sampled_ids_do_not_change_the_extension(renderer: Renderer) -> Iterator[str]:
    rng = random.Random(0)
    expected = renderer.extend([renderer.stop_ids[0]], [USER])
    for _ in range(20):
        sampled = [rng.randrange(renderer.vocab_size) for _ in range(rng.randrange(20))] + [renderer.stop_ids[0]]
        if renderer.extend(sampled, [USER]) != expected:
            yield f"the ids appended to the reply {sampled} differ from those appended to another"


def parsing_inverts_a_text_reply(renderer: Renderer) -> Iterator[str]:
    yield from _compare_parsed(renderer, REPLIES["text"], ())


def parsing_inverts_calls(renderer: Renderer) -> Iterator[str]:
    for name in ("a call", "text and calls"):
        yield from _compare_parsed(renderer, REPLIES[name], (LOOK,))


def parsing_never_raises(renderer: Renderer) -> Iterator[str]:
    rng = random.Random(0)
    reads_calls = bool(getattr(renderer, "reads_calls", True))
    whole = renderer.render([USER, REPLIES["text and calls" if reads_calls else "text"]])
    for length in range(200):
        noise = [rng.randrange(-2, renderer.vocab_size + 9) for _ in range(length)]
        for ids in (noise, [rng.choice(whole) for _ in range(length)], whole[-length:]):
            message = renderer.parse(ids)
            if message.role != "assistant":
                yield f"the reply {ids} is parsed as a {message.role} message"


def text_never_becomes_a_mark(renderer: Renderer) -> Iterator[str]:
    plain = [Message("user", "x"), Message("assistant", "x"), Message("user", "x")]
    seen = {*renderer.render(plain), *renderer.stop_ids}
    marks = {index: text for index in sorted(seen) if MARK.fullmatch(text := renderer.decode([index]))}
    spelled = f"a {' '.join(marks.values())} b"
    hostile = [Message(message.role, spelled) for message in plain]
    pairs = [(renderer.render(hostile), renderer.render(plain))]
    pairs.append((renderer.extend((), hostile[:1]), renderer.extend((), plain[:1])))
    for ids, expected in pairs:
        for index, text in marks.items():
            if ids.count(index) != expected.count(index):
                yield f"a message that spells {text!r} gets its id {index}"
        if spelled not in renderer.decode(ids):
            yield f"the text {spelled!r} is rendered as {renderer.decode(ids)!r}"


CHECKS: dict[str, Callable[[Renderer], Iterator[str]]] = {
    check.__name__.replace("_", " "): check
    for check in (
        ids_are_in_range,
        contents_are_rendered,
        a_user_message_is_appended_as_rendered,
        a_tool_message_is_appended_as_rendered,
        a_cut_reply_is_ended,
        extending_does_not_read_the_history,
        sampled_ids_do_not_change_the_extension,
        parsing_inverts_a_text_reply,
        parsing_inverts_calls,
        parsing_never_raises,
        text_never_becomes_a_mark,
    )
}
NEEDS_TOOLS = frozenset({"a tool message is appended as rendered", "parsing inverts calls"})


@dataclass
class _Watched(Sequence[int]):
    """A list of ids that counts how many of them are read."""

    ids: list[int]
    reads: int = field(default=0)

    def __getitem__(self, index: int | slice) -> int | list[int]:  # type: ignore[override]
        part = self.ids[index]
        self.reads += len(part) if isinstance(part, list) else 1
        return part

    def __len__(self) -> int:
        return len(self.ids)


def _compare_extension(
    renderer: Renderer, reply: Message, new: Sequence[Message], tools: Sequence[ToolSpec]
) -> Iterator[str]:
    """Checks that the extension is the end of the whole render, from the reply's end token on."""
    whole = renderer.render([USER, reply, *new], tools)
    appended = renderer.extend(renderer.render([USER], tools), new)
    if whole[-len(appended) :] != appended:
        yield f"extend gives {renderer.decode(appended)!r}, the whole ends {renderer.decode(whole[-len(appended) :])!r}"


def _compare_parsed(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec]) -> Iterator[str]:
    """Checks that the reply, cut out of the ids of its conversation, is parsed as itself.

    A template that gives a past reply another beginning than its generation prompt, or no end, has no such ids.
    """
    prompt, whole = renderer.render([USER], tools), renderer.render([USER, reply], tools)
    reply_ids = whole[len(prompt) :]
    if whole[: len(prompt)] != prompt or not set(reply_ids) & set(renderer.stop_ids):
        return
    message = renderer.parse(reply_ids, tools, prompt)
    if _meaning(message) != _meaning(reply):
        yield f"the reply {renderer.decode(reply_ids)!r} is parsed as {message}"


def _meaning(message: Message) -> tuple[object, ...]:
    """Returns the meaning of a reply, without the ids of its calls: many formats have none, or their own."""
    calls = [(getattr(call, "name", None), getattr(call, "arguments", None)) for call in message.tool_calls]
    return message.content, message.reasoning, calls
