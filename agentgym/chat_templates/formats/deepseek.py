"""Calls as DeepSeek's models write them, in a section of their own, up to V3.1.

V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>go`, the arguments in a fenced block of JSON, and
`<｜tool▁call▁end｜>`. V3.1: `<｜tool▁call▁begin｜>go<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.call_json import as_call, read_json
from agentgym.chat_templates.formats.grammar import NAME, CallGrammar
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.tagged import FoundCall, Tags, read_tagged
from agentgym.types import Message

__all__ = ["DEEPSEEK_V3", "DEEPSEEK_V31"]

SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"
TAGS = Tags("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", section=SECTION, separator=SEPARATOR)
MARKS = ("<think>", "</think>", TAGS.opening, TAGS.closing, SEPARATOR, *SECTION)
HOW_TO_WRITE_V3 = f"Write function{SEPARATOR}tool, and behind it a line with ```json, the arguments, and ```"
HOW_TO_WRITE_V31 = f"Write tool{SEPARATOR}{{...}}"


def read_v3(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply of V3 or R1."""
    return read_tagged(text, context, TAGS, read_fenced_body)


def read_v31(text: str, context: ReplyContext) -> Message:
    """Returns the message of a reply of V3.1."""
    return read_tagged(text, context, TAGS, read_v31_body)


def read_fenced_body(body: str, context: ReplyContext) -> Sequence[FoundCall]:
    """Returns the call of a body whose JSON is fenced; raises ValueError with the reason."""
    kind, separator, rest = body.partition(SEPARATOR)
    if not separator or kind.strip() != "function":
        raise ValueError(f"a call begins with function{SEPARATOR}. {HOW_TO_WRITE_V3}")
    name, _, fenced = rest.partition("\n")
    inside = fenced.strip().removeprefix("```json").removeprefix("```")
    if not fenced.lstrip().startswith("```") or not inside.endswith("```"):
        raise ValueError(f"the arguments stand between ```json and ```. {HOW_TO_WRITE_V3}")
    return [_call(name, inside.removesuffix("```"), HOW_TO_WRITE_V3)]


def read_v31_body(body: str, context: ReplyContext) -> Sequence[FoundCall]:
    """Returns the call of a body that is a name and JSON; raises ValueError with the reason."""
    name, separator, arguments = body.partition(SEPARATOR)
    if not separator:
        raise ValueError(f"{SEPARATOR} stands between the name and the arguments. {HOW_TO_WRITE_V31}")
    return [_call(name, arguments, HOW_TO_WRITE_V31)]


def _call(name: str, arguments: str, how_to_write: str) -> FoundCall:
    try:
        return FoundCall(*as_call({"name": name.strip(), "arguments": arguments.strip() and read_json(arguments)}))
    except ValueError as error:
        raise ValueError(f"{error}. {how_to_write}") from None


DEEPSEEK_V3 = ReplyFormat(
    "deepseek_v3",
    "DeepSeek V3, R1 and their distilled models",
    read_v3,
    MARKS,
    ends=("<｜end▁of▁sentence｜>",),
    aliases=("deepseek_r1",),
    grammar=CallGrammar(TAGS.opening, f"{TAGS.opening}function{SEPARATOR}{NAME}\n```json\n", f"\n```{TAGS.closing}"),
)
DEEPSEEK_V31 = ReplyFormat(
    "deepseek_v31",
    "DeepSeek V3.1",
    read_v31,
    MARKS,
    ends=("<｜end▁of▁sentence｜>",),
    grammar=CallGrammar(TAGS.opening, f"{TAGS.opening}{NAME}{SEPARATOR}", TAGS.closing),
)
