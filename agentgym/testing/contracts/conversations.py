"""A hundred conversations, as data, that chat templates often get wrong, and the turns of each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentgym.types import JSON, Message, ToolCall, ToolSpec

__all__ = ["CONVERSATIONS", "GO", "TOOLS", "ChatExchange", "SampleConversation", "exchanges", "random_conversation"]


@dataclass(frozen=True, slots=True)
class SampleConversation:
    """A named conversation: `SampleConversation("a greeting", (Message("user", "Hi."),))`."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """A reply with what precedes and follows it: the input that `extend` has to get right."""

    history: tuple[Message, ...]
    reply: Message
    new: tuple[Message, ...]
    """The messages that answer the reply, up to the next one."""
    tools: tuple[ToolSpec, ...]


def exchanges(conversation: SampleConversation) -> Iterator[ChatExchange]:
    """Yields every reply of a conversation that something follows."""
    messages = conversation.messages
    indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
    for index, end in zip(indices, [*indices[1:], len(messages)], strict=False):
        if index and end > index + 1:
            new = messages[index + 1 : end]
            yield ChatExchange(messages[:index], messages[index], new, conversation.tools)


def _spec(name: str, description: str, **properties: JSON) -> ToolSpec:
    required = [key for key in properties if key != "options"]
    return ToolSpec(name, description, {"type": "object", "properties": properties, "required": required})


_TEXT: JSON = {"type": "string", "description": "Any text."}
GO = _spec("go", "Walks one step.", direction={"type": "string", "description": "Where to.", "enum": ["north", "é"]})
SEARCH = _spec(
    "search",
    "Finds <b>pages</b> by 'words' & \"phrases\".",
    query=_TEXT,
    limit={"type": "integer", "description": "How many."},
    options={"type": "object", "description": "More.", "properties": {"deep": {"type": "boolean"}}},
)
WRITE = _spec("write", "Schreibt — 書く 🙂.", path=_TEXT, lines={"type": "array", "items": {"type": "string"}})
PING = ToolSpec("ping", "Takes nothing.", {"type": "object", "properties": {}})
TOOLS = (GO, SEARCH, WRITE, PING)

SYSTEM = Message("system", "You are a careful explorer.")
ASK = Message("user", "Where are you?")
MORE = Message("user", "And now?")
SAY = Message("assistant", "In a cave.")
UNICODE = "Zwölf Boxkämpfer 日本語 한국어 עברית 👩‍👩‍👧 e\u0301 ﬁ Ω"
CODE = 'def f(x):\n\treturn {"a": [x, None]}  # "quoted" \\ back\\slash\n'
LONG = "The corridor goes on and on. " * 200


class _Script:
    """A builder of a conversation; its calls get unique ids of nine letters and digits."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self._num_calls = 0

    def say(self, role: str, content: str, reasoning: str | None = None) -> _Script:
        """Adds a message without calls."""
        self.messages.append(Message(role, content, reasoning))  # type: ignore[arg-type]
        return self

    def call(
        self,
        *calls: tuple[str, dict[str, JSON]],
        results: Sequence[str] = (),
        content: str = "",
        reasoning: str | None = None,
    ) -> _Script:
        """Adds a reply with calls and, if `results` holds any, a tool message for each."""
        tool_calls = tuple(ToolCall(self._next_id(), name, arguments) for name, arguments in calls)
        self.messages.append(Message("assistant", content, reasoning, tool_calls))
        for call, result in zip(tool_calls, results, strict=False):
            self.messages.append(Message("tool", result, tool_call_id=call.id, name=call.name))
        return self

    def _next_id(self) -> str:
        self._num_calls += 1
        return f"call{self._num_calls:05d}"


NORTH: tuple[str, dict[str, JSON]] = ("go", {"direction": "north"})
FIND: tuple[str, dict[str, JSON]] = ("search", {"query": "é <b> 'x'", "limit": 3})
NESTED: tuple[str, dict[str, JSON]] = (
    "search",
    {"query": 'a\n"b"', "limit": -1, "options": {"deep": True, "tags": [1, 2.5, None, {"k": ["v", {}]}], "ü": ""}},
)


def _talks() -> Iterator[tuple[str, _Script]]:
    yield "one user message", _Script(ASK)
    yield "a system prompt", _Script(SYSTEM, ASK)
    yield "an empty system prompt", _Script(Message("system", ""), ASK)
    yield "a padded system prompt", _Script(Message("system", " \n Be brief.\n\n"), ASK)
    yield "an empty user message", _Script(Message("user", ""))
    yield "a user message of white space", _Script(Message("user", " \n\t\n "))
    yield "a talk", _Script(ASK, SAY, MORE)
    yield "a talk with a system prompt", _Script(SYSTEM, ASK, SAY, MORE)
    yield "an empty reply", _Script(ASK, Message("assistant", ""), MORE)
    yield "a reply of white space", _Script(ASK, Message("assistant", " \n "), MORE)
    yield "a padded reply", _Script(ASK, Message("assistant", "\n\n In a cave. \n"), MORE)
    yield "a padded user message after a reply", _Script(ASK, SAY, Message("user", "\n\n And now? \n"))
    yield "an empty user message after a reply", _Script(ASK, SAY, Message("user", ""))
    yield "two user messages", _Script(ASK, MORE)
    yield "two user messages after a reply", _Script(ASK, SAY, MORE, Message("user", "Hello?"))
    yield "two replies in a row", _Script(ASK, SAY, Message("assistant", "I wait."), MORE)
    yield "a conversation that begins with a reply", _Script(SAY, MORE)
    yield "a system message later on", _Script(ASK, SAY, Message("system", "Be brief."), MORE)
    yield "a system message at the end", _Script(ASK, SAY, Message("system", "Be brief."))
    yield "two system prompts", _Script(SYSTEM, Message("system", "Be brief."), ASK)
    yield "a conversation that ends with a reply", _Script(ASK, SAY)
    yield "unicode", _Script(Message("system", UNICODE), Message("user", UNICODE), Message("assistant", UNICODE), MORE)
    yield "unicode after a reply", _Script(ASK, SAY, Message("user", UNICODE))
    yield "code", _Script(Message("user", CODE), Message("assistant", CODE), Message("user", CODE))
    yield "long texts", _Script(Message("user", LONG), Message("assistant", LONG), Message("user", LONG))
    yield "a reply that was cut in mid-word", _Script(ASK, Message("assistant", "In a ca"), MORE)
    yield "a question about markup", _Script(Message("user", "What do <b>, [x] and {{ y }} mean? {% raw %}"), SAY, MORE)
    yield (
        "numbers that merge",
        _Script(Message("user", "1234567890"), Message("assistant", "12"), Message("user", "34")),
    )
    yield (
        "line breaks that merge",
        _Script(Message("user", "a\n"), Message("assistant", "\nb\n"), Message("user", "\n\nc")),
    )
    yield (
        "letters that merge",
        _Script(Message("user", "sys"), Message("assistant", "tem user assist"), Message("user", "ant")),
    )
    yield "switches of thinking", _Script(ASK, SAY, Message("user", "Go on. /no_think"))
    long_talk = _Script(SYSTEM)
    for number in range(12):
        long_talk.say("user", f"Question {number}?").say("assistant", f"Answer {number}.")
    yield "a long talk", long_talk.say("user", "Why?")


def _with_reasoning() -> Iterator[tuple[str, _Script]]:
    yield "reasoning", _Script(ASK).say("assistant", "In a cave.", "It is dark.").say("user", "And now?")
    yield (
        "reasoning twice",
        _Script(ASK).say("assistant", "A.", "One.").say("user", "B?").say("assistant", "C.", "Two.").say("user", "D?"),
    )
    yield "reasoning without an answer", _Script(ASK).say("assistant", "", "It is dark.").say("user", "And now?")
    yield "empty reasoning", _Script(ASK).say("assistant", "In a cave.", "").say("user", "And now?")
    yield "padded reasoning", _Script(ASK).say("assistant", "In a cave.", "\n\nIt is dark.\n ").say("user", "And now?")
    yield "long reasoning", _Script(ASK).say("assistant", "In a cave.", LONG).say("user", "And now?")
    yield "unicode reasoning", _Script(ASK).say("assistant", "In a cave.", UNICODE).say("user", "And now?")
    yield "reasoning at the end", _Script(ASK).say("assistant", "In a cave.", "It is dark.")


def _plays() -> Iterator[tuple[str, _Script]]:
    wall = ("A wall.",)
    yield "tools", _Script(ASK)
    yield "tools and a system prompt", _Script(SYSTEM, ASK)
    yield "tools that are never called", _Script(SYSTEM, ASK, SAY, MORE)
    yield "a call", _Script(ASK).call(NORTH, results=wall)
    yield "a call under a system prompt", _Script(SYSTEM, ASK).call(NORTH, results=wall)
    yield "a call and text", _Script(ASK).call(NORTH, results=wall, content="I walk.")
    yield "a call and padded text", _Script(ASK).call(NORTH, results=wall, content="\nI walk. \n\n")
    yield "a call and reasoning", _Script(ASK).call(NORTH, results=wall, reasoning="North?")
    yield "a call, text and reasoning", _Script(ASK).call(NORTH, results=wall, content="I walk.", reasoning="North?")
    yield "a call without arguments", _Script(ASK).call(("ping", {}), results=("pong",))
    yield "nested arguments", _Script(ASK).call(NESTED, results=wall)
    yield "unicode arguments", _Script(ASK).call(("search", {"query": UNICODE, "limit": 1}), results=(UNICODE,))
    yield (
        "code as an argument",
        _Script(ASK).call(("write", {"path": "a.py", "lines": CODE.split("\n")}), results=(CODE,)),
    )
    yield "an empty argument", _Script(ASK).call(("search", {"query": "", "limit": 0}), results=wall)
    yield "a list as an argument", _Script(ASK).call(("write", {"path": "x", "lines": []}), results=wall)
    yield "two calls", _Script(ASK).call(NORTH, FIND, results=("A wall.", "Nothing."))
    yield "two calls and text", _Script(ASK).call(NORTH, FIND, results=("A wall.", "Nothing."), content="Both.")
    yield "the same call twice", _Script(ASK).call(NORTH, NORTH, results=("A wall.", "A wall."))
    yield "five calls", _Script(ASK).call(NORTH, FIND, NORTH, NESTED, ("ping", {}), results=("a", "b", "c", "d", "e"))
    yield "an empty result", _Script(ASK).call(NORTH, results=("",))
    yield "a padded result", _Script(ASK).call(NORTH, results=("\n A wall.\n\n",))
    yield "a JSON result", _Script(ASK).call(FIND, results=('{"hits": [{"t": "é", "n": 1}], "next": null}',))
    yield "a long result", _Script(ASK).call(FIND, results=(LONG,))
    yield "a code result", _Script(ASK).call(FIND, results=(CODE,))
    yield "results, then a user message", _Script(ASK).call(NORTH, results=wall).say("user", "And now?")


def _loops() -> Iterator[tuple[str, _Script]]:
    wall = ("A wall.",)
    yield (
        "results, then an answer",
        _Script(ASK).call(NORTH, results=wall).say("assistant", "A wall.").say("user", "So?"),
    )
    yield "a second call", _Script(ASK).call(NORTH, results=wall).call(FIND, results=("Nothing.",))
    yield (
        "a second call of several",
        _Script(ASK).call(NORTH, FIND, results=("A", "B")).call(FIND, NORTH, results=("C", "D")),
    )
    yield "a call that waits", _Script(ASK).call(NORTH)
    yield "a call that a user message follows", _Script(ASK).call(NORTH).say("user", "Wait.")
    yield (
        "a call with a reasoned answer",
        (
            _Script(ASK)
            .call(NORTH, results=wall, reasoning="North?")
            .say("assistant", "A wall.", "Hm.")
            .say("user", "So?")
        ),
    )
    yield (
        "calls after a second question",
        (
            _Script(SYSTEM, ASK)
            .call(NORTH, results=wall, reasoning="North?")
            .say("assistant", "A wall.")
            .say("user", "Look it up.")
            .call(FIND, results=("Nothing.",), reasoning="Search.")
        ),
    )
    yield (
        "a result for a reply without a call",
        _Script(ASK, SAY, Message("tool", "No call.", tool_call_id="call00001")),
    )
    yield "fewer results than calls", _Script(ASK).call(NORTH, FIND, results=wall)
    yield "an answer in mid-call", _Script(ASK, Message("assistant", '{"name": "go", "argu'), MORE)
    yield "tools of one letter", _Script(ASK).call(("ping", {}), ("ping", {}), results=("1", "2")).say("user", "3")
    for turns in (4, 16):
        loop = _Script(SYSTEM, ASK)
        for number in range(turns):
            loop.call(NORTH, results=(f"Room {number}.",), reasoning="Go." if number % 2 else None)
        yield f"a loop of {turns} calls", loop
    mixed = _Script(ASK)
    for number in range(6):
        mixed.call(NORTH, FIND, results=(f"Room {number}.", "Nothing."), content="Again." if number % 3 == 0 else "")
        mixed.say("user", f"Hint {number}.") if number % 2 else mixed.say("assistant", "Well.").say("user", "Go on.")
    yield "a loop of calls, answers and hints", mixed


PIECES = (*(" ", "\n", "\n\n", "\t"), *("", "a", "Go", " north", "1", "23", "."), *("é", "日本", "🙂"), *"\"\\'{}")


def random_conversation(seed: int) -> SampleConversation:
    """Returns a conversation in an order of roles that agents meet, with texts that are often merged or trimmed."""
    rng = random.Random(seed)

    def text(longest: int = 8) -> str:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(longest)))

    script = _Script(*([Message("system", text())] if rng.random() < 0.5 else []))
    script.say("user", f"Begin{text()}")
    has_tools = rng.random() < 0.7
    for _ in range(rng.randrange(1, 5)):
        reasoning = text() if rng.random() < 0.3 else None
        if has_tools and rng.random() < 0.7:
            num_calls = rng.choice((1, 1, 1, 2, 3))
            drawn: tuple[str, dict[str, JSON]] = ("search", {"query": text(), "limit": 1})
            calls = [rng.choice((NORTH, FIND, NESTED, drawn)) for _ in range(num_calls)]
            results = [text() for _ in calls]
            script.call(*calls, results=results, content=rng.choice(("", text())), reasoning=reasoning)
            if rng.random() < 0.3:
                script.say("user", text())
        else:
            script.say("assistant", text(), reasoning).say("user", text())
    return SampleConversation(f"random {seed}", tuple(script.messages), TOOLS if has_tools else ())


def _conversations() -> Iterator[SampleConversation]:
    for name, script in (*_talks(), *_with_reasoning()):
        yield SampleConversation(name, tuple(script.messages))
    for name, script in (*_plays(), *_loops()):
        yield SampleConversation(name, tuple(script.messages), TOOLS)
    for seed in range(25):
        yield random_conversation(seed)


CONVERSATIONS: tuple[SampleConversation, ...] = tuple(_conversations())
"""The conversations; the calls of each have ids of nine letters and digits, which every template takes."""
