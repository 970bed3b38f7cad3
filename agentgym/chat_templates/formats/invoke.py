"""Calls as `<invoke name="go">` with a `<parameter name="to">` an argument: MiniMax, Dots, Step 3, DeepSeek's DSML."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from agentgym.call_json import read_json
from agentgym.chat_templates.formats.markup import Markup, bare_value, read_markup
from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.types import JSON, ToolSpec

__all__ = ["DEEPSEEK_V32", "DEEPSEEK_V41", "DOTS", "MINICPM5", "MINIMAX_M2", "STEP3"]


def opening_pattern(opening: str, group: str, attributes: str = "") -> str:
    """Returns the pattern of an opening with a name, in quotes of either kind or in none: `<invoke name="go">`."""
    return rf"""{re.escape(opening)}(?P<quote>["']?+)(?P<{group}>[^<>"'\n]++)(?P=quote){attributes}\s*+>"""


def invokes(prefix: str, *frames: tuple[str, str]) -> Markup:
    """Returns the markup of calls whose tags have that prefix, within those frames."""
    call, value = f"<{prefix}invoke name=", f"<{prefix}parameter name="
    inside = f'{call}"TOOL">\n{value}"NAME">VALUE</{prefix}parameter>\n</{prefix}invoke>'
    return Markup(
        example="\n".join([frames[0][0], inside, frames[0][1]]),
        call=(call, f"</{prefix}invoke>"),
        head=opening_pattern(call, "name"),
        value=(value, f"</{prefix}parameter>"),
        value_head=opening_pattern(value, "key"),
        frames=frames,
    )


def declared_value(head: re.Match[str], text: str, tool: ToolSpec | None) -> JSON:
    """Reads a value as its own tag marks it: a string (`string="true"`) or JSON; else by the tool's schema."""
    if head["string"] == "true":
        return text
    if head["string"] == "false":
        try:
            return read_json(text)
        except ValueError:
            pass
    return bare_value(head, text, tool)


def character_value(head: re.Match[str], text: str, tool: ToolSpec | None) -> JSON:
    """Reads a CDATA section as it is, and other text with XML's entities replaced, each by the tool's schema."""
    section, (opening, closing) = text.strip(), CDATA
    if section.startswith(opening) and section.endswith(closing):
        return bare_value(head, section.removeprefix(opening).removesuffix(closing), tool)
    plain = text.removeprefix("\n").removesuffix("\n")
    return bare_value(head, ENTITY.sub(lambda match: ENTITIES[match[0]], plain), tool)


ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&apos;": "'"}
ENTITY = re.compile("|".join(ENTITIES))
CDATA = ("<![CDATA[", "]]>")
HIDDEN = r"<!\[CDATA\[(?:[^\]<]++|\](?!\]>)|<(?!function name=))*+"
"""The part of a text that a CDATA section hides: all but a call, which hides itself."""

MINIMAX = invokes("", ("<minimax:tool_call>", "</minimax:tool_call>"))
DOTS_MARKUP = replace(invokes("", ("<dots_function_call>", "</dots_function_call>")), json_frames=True)
STEP3_MARKUP = replace(
    invokes(
        "steptml:",
        ("<｜tool_call_begin｜>", "<｜tool_call_end｜>"),
        ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    ),
    lead=r"\s|function<｜tool_sep｜>",
)


def dsml(prefix: str, *frames: str, other: str) -> Markup:
    """Returns the markup of a DeepSeek model whose tags have that prefix, in frames of those names.

    Marks with the prefix of the `other` models are malformed.
    """
    invoke, value = f'{prefix}invoke name="TOOL"', f'{prefix}parameter name="NAME" string="true|false"'
    inside = f"<{invoke}>\n<{value}>VALUE</{prefix}parameter>\n</{prefix}invoke>"
    wrong = [(f"<{other}{name}>", f"</{other}{name}>") for name in ("calls", "tool_calls", "function_calls")]
    return replace(
        invokes(prefix, *((f"<{prefix}{name}>", f"</{prefix}{name}>") for name in frames)),
        example=f"<{prefix}{frames[0]}>\n{inside}\n</{prefix}{frames[0]}>",
        value_head=opening_pattern(
            f"<{prefix}parameter name=", "key", attributes=r'(?:\s++string="(?P<string>true|false)")?+'
        ),
        read_value=declared_value,
        misspelled=(*wrong, (f"<{other}invoke name=", f"</{other}invoke>")),
    )


DSML = dsml("｜DSML｜", "function_calls", "tool_calls", other="｜DSML｜ ")
SPACED_DSML = dsml("｜DSML｜ ", "calls", other="｜DSML｜")
MINICPM = Markup(
    example='<function name="TOOL"><param name="NAME">VALUE</param></function>',
    call=("<function name=", "</function>"),
    head=opening_pattern("<function name=", "name"),
    value=("<param name=", "</param>"),
    value_head=opening_pattern("<param name=", "key"),
    verbatim=HIDDEN,
    misspelled=(("<functionname=", "</function>"),),
    read_value=character_value,
)

MINIMAX_M2 = ReplyFormat(
    "minimax_m2", "MiniMax M2", partial(read_markup, markup=MINIMAX), MINIMAX.marks, ends=("[e~[",)
)
DOTS = ReplyFormat("dots", "dots.llm", partial(read_markup, markup=DOTS_MARKUP), DOTS_MARKUP.marks)
STEP3 = ReplyFormat(
    "step3", "Step 3", partial(read_markup, markup=STEP3_MARKUP), (*STEP3_MARKUP.marks, "<｜tool_sep｜>")
)
DEEPSEEK_V32 = ReplyFormat(
    "deepseek_v32",
    "DeepSeek V3.2 and V4",
    partial(read_markup, markup=DSML),
    DSML.marks,
    ends=("<｜end▁of▁sentence｜>",),
    aliases=("deepseek_v4",),
)
DEEPSEEK_V41 = ReplyFormat(
    "deepseek_v41",
    "DeepSeek V4.1",
    partial(read_markup, markup=SPACED_DSML),
    SPACED_DSML.marks,
    ends=("<｜end▁of▁sentence｜>",),
)
MINICPM5 = ReplyFormat(
    "mini_c_p_m5_x_m_l",
    "MiniCPM 5",
    partial(read_markup, markup=MINICPM),
    MINICPM.marks,
    ends=("<|im_end|>",),
    aliases=("openbmb_minicpm5_1b",),
)
