"""Calls as Kimi K3 writes them, by three marks: `<|open|>call tool="go" index="1"<|sep|>...<|close|>call<|sep|>`.

A reply is a `think`, a `response` and a `tools` element; a call holds `argument` elements, whose text is a string or
JSON by their `type`, or one `json` element.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentgym.call_json import add_unique, as_call, read_arguments, read_json
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.tagged import FoundCall, Tags, read_tagged
from agentgym.types import JSON, Message

__all__ = ["KIMI_K3"]

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
HOW_TO_WRITE = (
    f'Write {OPEN}call tool="tool" index="1"{SEPARATOR}, for each argument {OPEN}argument key="name" type="string"'
    f"{SEPARATOR}text{CLOSE}argument{SEPARATOR}, and {CLOSE}call{SEPARATOR}"
)


def _element(name: str) -> tuple[str, str]:
    return f"{OPEN}{name}{SEPARATOR}", f"{CLOSE}{name}{SEPARATOR}"


TAGS = Tags(
    f"{OPEN}call ",
    f"{CLOSE}call{SEPARATOR}",
    thinking=_element("think"),
    silent=(*_element("response"), *_element("message"), "<|end_of_msg|>"),
    section=_element("tools"),
    must_close=True,
)
ATTRIBUTE = re.compile(r'(\w++)="([^"]*+)"')
PART = re.compile(
    r"\s*+<\|open\|>(?P<element>argument|json)\b(?P<attributes>(?:[^<]++|<(?!\|))*+)<\|sep\|>"
    r"(?P<text>(?:[^<]++|<(?!\|close\|>(?:argument|json)<\|sep\|>))*+)<\|close\|>(?P=element)<\|sep\|>\s*+"
)


def read_kimi_k3_body(body: str, context: ReplyContext) -> Sequence[FoundCall]:
    """Returns the call of a body, which begins with the attributes; raises ValueError with the reason."""
    attributes, separator, parts = body.partition(SEPARATOR)
    try:
        if not separator:
            raise ValueError(f"{SEPARATOR} stands behind the tool's name")
        return [FoundCall(*as_call({**_attributes(attributes), "arguments": _arguments(parts)}, ("tool",)))]
    except ValueError as error:
        raise ValueError(f"{error}. {HOW_TO_WRITE}") from None


def _arguments(parts: str) -> Mapping[str, JSON]:
    arguments: dict[str, JSON] = {}
    position = 0
    parts = parts.strip()
    while position < len(parts):
        match = PART.match(parts, position)
        if match is None:
            raise ValueError(f"expected an argument, got {parts[position : position + 40]!r}")
        position = match.end()
        if match["element"] == "json":
            for key, value in read_arguments(match["text"].strip() and read_json(match["text"])).items():
                add_unique(arguments, key, value)
            continue
        attributes = _attributes(match["attributes"])
        if "key" not in attributes:
            raise ValueError("an argument needs a key")
        is_text = attributes.get("type", "string") == "string"
        add_unique(arguments, attributes["key"], match["text"] if is_text else read_json(match["text"]))
    return arguments


def _attributes(text: str) -> Mapping[str, str]:
    pairs = ATTRIBUTE.findall(text)
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in pairs}


def read_kimi_k3(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply."""
    return read_tagged(text, context, TAGS, read_kimi_k3_body)


KIMI_K3 = ReplyFormat(
    "kimi_k3",
    "Kimi K3",
    read_kimi_k3,
    (OPEN, CLOSE, SEPARATOR, "<|end_of_msg|>"),
    TAGS.thinking,
    ends=("<|end_of_msg|>",),
)
