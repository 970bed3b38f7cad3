"""Calls as Qwen3-Coder writes them: `<tool_call>`, in it `<function=go>`, in that `<parameter=to>` per argument."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from agentgym.chat_templates.formats.grammar import NAME, CallGrammar
from agentgym.chat_templates.formats.markup import Markup, line_value, read_markup, text_value
from agentgym.chat_templates.formats.protocol import ReplyFormat

__all__ = ["QWEN3_CODER", "SEED_OSS"]

CODER = Markup(
    example="<tool_call>\n<function=TOOL>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    call=("<function=", "</function>"),
    head=r"<function=(?P<name>[^<>\n]++)(?:>|\s*+(?=</function>))",
    value=("<parameter=", "</parameter>"),
    value_head=r"<parameter=(?P<key>[^<>\n]++)>",
    frames=(("<tool_call>", "</tool_call>"),),
    read_value=line_value,
)
SEED = replace(
    CODER,
    example="<seed:tool_call>\n<function=TOOL>\n<parameter=NAME>VALUE</parameter>\n</function>\n</seed:tool_call>",
    frames=(("<seed:tool_call>", "</seed:tool_call>"),),
    thinking=("<seed:think>", "</seed:think>"),
    read_value=text_value,
)


QWEN3_CODER = ReplyFormat(
    "qwen3_coder",
    "Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Step 3.5",
    partial(read_markup, markup=CODER),
    CODER.marks,
    CODER.thinking,
    ends=("<|im_end|>", "<|endoftext|>"),
    aliases=("qwen3_5", "nemotron3", "step3p5"),
    grammar=CallGrammar(
        "<tool_call>",
        f"<tool_call>\n<function={NAME}>\n",
        "\n</function>\n</tool_call>",
        arguments="qwen_xml_parameter",
    ),
)
SEED_OSS = ReplyFormat(
    "seed_oss", "Seed-OSS", partial(read_markup, markup=SEED), SEED.marks, SEED.thinking, ends=("<seed:eos>",)
)
