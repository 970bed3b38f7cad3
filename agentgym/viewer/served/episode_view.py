"""One episode as the viewer's page shows it: its conversation, and its tokens with what was recorded of each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentgym.rollout.record.branches import branches_of
from agentgym.rollout.record.episodes_file import row_from_json
from agentgym.rollout.record.stored_fields import NO_EPISODE, check_stored_ids
from agentgym.types import JSON
from agentgym.viewer.index.episode_row import MAX_LINE_BYTES
from agentgym.viewer.run_data import JSONObject, object_of, objects
from agentgym.viewer.token_text import TokenTexts, looks_special, visible

__all__ = ["episode_view", "readable"]

MAX_CHARACTERS = 100_000
"""The most characters of one text that are sent to the page."""
MAX_TOKENS = 100_000
"""The most tokens of an episode that are sent to the page."""
MAX_DEPTH = 40
SOURCES = ("prompt", "policy", "env")
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]"
)


def episode_view(line: bytes, texts: TokenTexts) -> dict[str, JSON]:
    """Returns the episode of a line; raises one of NO_EPISODE if it is not one, or has too many bytes to be shown.

    Texts are cut after MAX_CHARACTERS, and have their control characters and marks of direction spelled out. Tokens are
    left out if there are more than MAX_TOKENS.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it has {len(line):,} bytes, more than {MAX_LINE_BYTES:,}: `agentgym episodes` prints it")
    record = object_of(json.loads(line))
    rows = objects(record["rows"])
    num_tokens = sum(len(_list(span["ids"])) for row in rows for span in objects(row["spans"]))
    view: dict[str, JSON] = {
        "turns": [_turn(turn) for turn in objects(record["turns"])],
        "opening": _opening(record, rows),
        "num_tokens": num_tokens,
        "tokens_left_out": num_tokens > MAX_TOKENS,
        "token_reason": texts.reason,
        **{name: _readable_value(record.get(name)) for name in ("task", "metrics", "error", "info")},
    }
    view["branches"] = _branches(rows)
    if num_tokens <= MAX_TOKENS:
        view |= _tokens(record, rows, texts)
    return view


def readable(text: str) -> str:
    """Returns the text with control characters and marks of direction spelled out, cut after MAX_CHARACTERS.

    >>> readable("a\\u202eb")
    'a\\\\u202eb'
    """
    rest = len(text) - MAX_CHARACTERS
    cut = f"{text[:MAX_CHARACTERS]} … {rest:,} more characters: `agentgym episodes` prints them" if rest > 0 else text
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}" if match[0] < "\u0100" else ascii(match[0])[1:-1], cut)


def _turn(turn: JSONObject) -> JSON:
    message = object_of(turn["message"])
    return {
        "message": _message(message),
        "reward": turn["reward"],
        "observation": readable(str(turn["observation"])),
        "results": [
            {
                "name": readable(str(result["name"])),
                "content": readable(str(result["content"])),
                "error": None if result["error"] is None else readable(str(result["error"])),
            }
            for result in objects(turn["tool_results"])
        ],
        "finish": turn["finish_reason"],
        "asked": readable(str(turn.get("asked") or "")),
    }


def _message(message: JSONObject) -> dict[str, JSON]:
    calls: list[JSON] = []
    for call in objects(message.get("tool_calls") or []):
        if "raw" in call:
            is_cut = call.get("truncated") is True
            calls.append(
                {"raw": readable(str(call["raw"])), "error": readable(str(call["error"])), "truncated": is_cut}
            )
        else:
            calls.append({"name": readable(str(call["name"])), "arguments": _readable_value(call["arguments"])})
    reasoning = message.get("reasoning")
    return {
        "role": str(message["role"]),
        "content": readable(str(message["content"])),
        "reasoning": None if reasoning is None else readable(str(reasoning)),
        "calls": calls,
    }


def _opening(record: JSONObject, rows: Sequence[JSONObject]) -> list[JSON]:
    """Returns the messages that the conversation began with; empty if the record does not contain them."""
    if rows and isinstance(rows[0].get("messages"), list):
        return [_message(message) for message in objects(rows[0]["messages"])]
    info = object_of(record["info"])
    without_ids = info.get("ids_left_out") or info.get("chat_endpoint")
    messages = without_ids.get("opening") if isinstance(without_ids, dict) else None
    opening = (
        messages if isinstance(messages, list) else object_of(object_of(record["task"])["options"]).get("messages")
    )
    return [_plain_message(each) for each in opening if isinstance(each, dict)] if isinstance(opening, list) else []


def _plain_message(message: JSONObject) -> JSON:
    """Returns a message in OpenAI's form, whose content may have parts."""
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return {"role": str(message.get("role")), "content": readable(text), "reasoning": None, "calls": []}


def _branches(rows: Sequence[JSONObject]) -> JSON:
    """Returns the branches of an episode whose rows are a tree; empty for others, and for rows that cannot be read."""
    if len(rows) == 1 and not any(span.get("excluded") for span in objects(rows[0]["spans"])):
        return []
    try:
        branches = branches_of([row_from_json(row, {}) for row in rows])
    except NO_EPISODE:
        return []
    return [_readable_value({**asdict(branch), "num_trained": branch.num_trained}) for branch in branches]


def _tokens(record: JSONObject, rows: Sequence[JSONObject], texts: TokenTexts) -> dict[str, JSON]:
    """Returns the rows as spans of [source, ids, logprobs, versions, exclusion], the advantages, and the ids' texts."""
    ids: set[int] = set()
    view_rows: list[JSON] = []
    for row in rows:
        spans: list[JSON] = []
        for span in objects(row["spans"]):
            check_stored_ids(span["ids"])
            ids.update(_list(span["ids"]))
            source = SOURCES.index(str(span["source"]))
            logprobs, reason = _round_values(span.get("logprobs")), readable(str(span.get("excluded") or ""))
            spans.append([source, span["ids"], logprobs, span.get("policy_versions"), reason])
        view_rows.append(spans)
    advantages = record.get("advantages")
    spelled = {each: texts.decode(each) if texts.decode else f"⟨{each}⟩" for each in sorted(ids)}
    return {
        "rows": view_rows,
        "advantages": [_round_values(row) for row in advantages] if isinstance(advantages, list) else None,
        "texts": {str(token_id): visible(text) for token_id, text in spelled.items()},
        "special": [
            i for i, text in spelled.items() if i in texts.special_ids or (texts.decode and looks_special(text))
        ],
    }


def _readable_value(value: JSON, depth: int = 0) -> JSON:
    """Returns JSON with readable texts; what is nested deeply is left out."""
    if isinstance(value, str):
        return readable(value)
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {readable(name): _readable_value(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_readable_value(item, depth + 1) for item in value]
    return value


def _list(value: JSON) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list was wanted, got {type(value).__name__}")
    return value


def _round_values(values: JSON) -> JSON:
    return [round(float(value), 5) for value in values] if isinstance(values, list) else None
