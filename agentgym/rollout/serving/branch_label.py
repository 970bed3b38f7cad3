"""What an agent's headers and the shape of its requests say: the labels of branches, and which program asks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from agentgym.rollout.serving.wires.wire import AgentRequest
from agentgym.types import JSON, Message, ToolCall

__all__ = [
    "MIN_TASK",
    "SIDE_LABELS",
    "agent_name",
    "answers_unknown_calls",
    "client_name",
    "header_label",
    "shape_label",
    "texts_of_calls",
]

TASK_WORDS = re.compile(r"\b(?:(titles?)|summar\w*|compact\w*)\b", re.IGNORECASE)
"""The words by which an agent asks for a title, or for a summary of its conversation."""
SIDE_LABELS = ("sub-agent", "summary", "title", "side")
"""The labels of what an agent asks beside its task."""
CLASSES = {
    "main": "main",
    "subagent": "sub-agent",
    "workflow": "sub-agent",
    "compaction": "summary",
    "auxiliary": "side",
    "side_reply": "side",
}
"""The labels of Claude Code's own names for its requests."""
AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id", "x-session-affinity")
"""The headers in which Claude Code, Codex and OpenCode name the conversation that a request belongs to."""
MIN_TASK = 8
"""The fewest characters by which a sub-agent's task is recognized in a call, and a summary in what goes on from it."""


def header_label(headers: Mapping[str, str], request: AgentRequest) -> str:
    """Returns the label that the headers of Codex, Claude Code or OpenCode give a request; empty if they give none."""
    values = {name.lower(): value for name, value in headers.items()}
    if "title" in values.get("x-claude-code-auxiliary-type", ""):
        return "title"
    if label := CLASSES.get(values.get("x-claude-code-request-class", "")):
        return label
    is_compaction = '"request_kind":"compaction"' in values.get("x-codex-turn-metadata", "").replace(" ", "")
    if is_compaction or values.get("x-openai-subagent") == "compact":
        return "summary"
    if {
        "x-codex-parent-thread-id",
        "x-openai-subagent",
        "x-claude-code-agent-id",
        "x-parent-session-id",
    } & values.keys():
        return "sub-agent"
    if "x-session-affinity" in values and not request.tools:  # OpenCode
        is_long = any(message.role == "assistant" for message in request.messages)
        return "summary" if is_long else _wanted_text([message.content for message in request.messages]) or "title"
    return "main" if {"x-codex-turn-metadata", "x-claude-code-session-id", "x-session-affinity"} & values.keys() else ""


def agent_name(headers: Mapping[str, str]) -> str:
    """Returns the name of the conversation that the headers of a harness give a request; empty if they give none."""
    return next((headers[name] for name in AGENT_HEADERS if name in headers), "")


def client_name(headers: Mapping[str, str], path: str) -> str:
    """Returns the dialect of a request and the program that sent it.

    >>> client_name({"User-Agent": "codex_exec/0.171.0 (Linux)"}, "/v1/responses")
    'responses codex_exec/0.171.0'
    """
    program = "".join(filter(str.isprintable, headers.get("User-Agent", ""))).partition(" ")[0][:60]
    return f"{path.split('/')[2]} {program}".strip()


def answers_unknown_calls(client: str) -> bool:
    """Returns whether the client answers a call of a tool that it does not have with an error, and goes on.

    Codex and Claude Code do. The Agents SDK of OpenAI ends; of a client that names only a library, nobody can tell.
    """
    return client.partition(" ")[2].startswith(("codex", "claude-cli/"))


def shape_label(new: Sequence[Message], calls: Collection[str], *, is_single: bool, has_tools: bool) -> str:
    """Returns the label of a side branch or a fork without headers; empty if nothing in it shows one.

    `new` are the messages that begin it, and `calls` the arguments of all calls in the episode: a sub-agent's task is
    one of them. `is_single` is True if it has a single reply, without calls.
    """
    requests = [message.content.strip() for message in new if message.role == "user"]
    if any(len(text) >= MIN_TASK and text in calls for text in requests):
        return "sub-agent"
    texts = requests[-1:] if has_tools else [message.content for message in new]
    return _wanted_text(texts) if is_single else ""


def texts_of_calls(messages: Sequence[Message]) -> frozenset[str]:
    """Returns the texts among the arguments of all calls."""
    calls = (call for message in messages for call in message.tool_calls if isinstance(call, ToolCall))
    return frozenset(text.strip() for call in calls for text in _texts(call.arguments))


def _wanted_text(texts: Sequence[str]) -> str:
    """Returns the label of the text that is asked for, by the first word for one; empty if there is none."""
    match = next(filter(None, map(TASK_WORDS.search, texts)), None)
    return "" if match is None else "title" if match[1] else "summary"


def _texts(value: JSON) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, Sequence):
        for entry in value:
            yield from _texts(entry)
