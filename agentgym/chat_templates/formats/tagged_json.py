"""Families that write calls as JSON between a tag and its closing: `<tool_calls>[{"name": ...}]</tool_calls>`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentgym.call_json import json_kind
from agentgym.chat_templates.formats.grammar import TAGGED_OBJECT
from agentgym.chat_templates.formats.json_calls import JsonCalls
from agentgym.chat_templates.formats.json_text import json_span
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.tagged import FoundCall, ReadBody, Tags, UnreadCall, read_tagged
from agentgym.types import JSON, Message

__all__ = ["TAGGED_JSON"]


def tagged_json(
    names: Sequence[str],
    models: str,
    tags: Tags,
    read_body: ReadBody,
    ends: tuple[str, ...],
    marks: tuple[str, ...] = (),
) -> ReplyFormat:
    """Returns the format of a family; `names` are its name and aliases, `marks` are those besides its tags."""

    def read(text: str, context: ReplyContext) -> Message:
        return read_tagged(text, context, tags, read_body)

    every = (*tags.thinking, tags.opening, tags.closing, *tags.silent, *marks)
    return ReplyFormat(names[0], models, read, every, tags.thinking, ends, tuple(names[1:]))


class KeyedCalls(JsonCalls):
    """Calls that are objects with one key, the name: `[{"go": {"direction": "north"}}]`."""

    def call(self, value: JSON) -> FoundCall:
        """Returns the call that a JSON value is; raises ValueError that names what it lacks."""
        if not isinstance(value, dict) or len(value) != 1:
            got = f"the keys {', '.join(value)}"[:80] if isinstance(value, dict) else json_kind(value)
            raise ValueError(f"a call is a JSON object with one key, the tool's name, got {got}")
        ((name, arguments),) = value.items()
        return super().call({"name": name, "arguments": arguments})


def read_lines(body: str, context: ReplyContext) -> Sequence[FoundCall | UnreadCall]:
    """Returns the calls of a body that is a sequence of JSON objects; one that cannot be read ends them."""
    calls, position = list[FoundCall | UnreadCall](), 0
    while rest := body[position:].strip():
        end, _ = json_span(body, position)
        try:
            calls += OBJECT(body[position:end], context)
        except ValueError as error:
            if not calls:
                raise
            return [*calls, UnreadCall(rest, str(error))]
        position = end
    return calls


def read_action(body: str, context: ReplyContext) -> Sequence[FoundCall | UnreadCall]:
    """Returns the call of an action of InternLM, which begins with what it addresses."""
    inner = body.lstrip()
    if not inner.startswith(PLUGIN):
        raise ValueError(f"{PLUGIN} does not follow {ACTION}. Write {ACTION}{PLUGIN}{OBJECT.write}")
    return OBJECT_OF_PARAMETERS(inner.removeprefix(PLUGIN), context)


ACTION, PLUGIN = "<|action_start|>", "<|plugin|>"
OBJECT = JsonCalls()
OBJECT_OF_PARAMETERS = JsonCalls(arguments=("parameters", "arguments"), write='{"name": "tool", "parameters": {...}}')
LIST = JsonCalls(listed=True, write='[{"name": "tool", "arguments": {...}}]')
COHERE = JsonCalls(
    listed=True,
    names=("tool_name", "name"),
    arguments=("parameters", "arguments"),
    id="tool_call_id",
    write='[{"tool_call_id": "0", "tool_name": "tool", "parameters": {...}}]',
)
COHERE_FRAMES = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
FINAL = ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]")

TAGGED_JSON = (
    replace(
        tagged_json(
            ("granite4",),
            "Granite 4",
            Tags("<tool_call>", "</tool_call>", json_body=True),
            OBJECT,
            ("<|end_of_text|>",),
        ),
        grammar=TAGGED_OBJECT,
    ),
    tagged_json(
        ("ernie45",),
        "ERNIE 4.5",
        Tags("<tool_call>", "</tool_call>", silent=("<response>", "</response>"), json_body=True),
        OBJECT,
        ("</s>", "<|end_of_sentence|>"),
    ),
    tagged_json(
        ("reka_edge",),
        "Reka Edge",
        Tags("<tool_call>", "</tool_call>", json_body=True),
        OBJECT,
        ("<sep>",),
    ),
    tagged_json(
        ("longcat_flash",),
        "LongCat Flash",
        Tags(
            "<longcat_tool_call>",
            "</longcat_tool_call>",
            thinking=("<longcat_think>", "</longcat_think>"),
            json_body=True,
        ),
        OBJECT,
        ("</longcat_s>",),
    ),
    tagged_json(
        ("hunyuan_a13_b",),
        "Hunyuan A13B",
        Tags("<tool_calls>", "</tool_calls>", silent=("<answer>", "</answer>"), json_body=True),
        LIST,
        ("<|eos|>",),
    ),
    tagged_json(
        ("minimax_m1",),
        "MiniMax M1",
        Tags("<tool_calls>", "</tool_calls>", json_body=True),
        read_lines,
        ("<end_of_sentence>",),
    ),
    tagged_json(
        ("nemotron", "nemotron_nano"),
        "Nemotron Nano v2, Llama-Nemotron",
        Tags("<TOOLCALL>", "</TOOLCALL>", json_body=True),
        LIST,
        ("<SPECIAL_12>", "<|eot_id|>"),
    ),
    tagged_json(
        ("apriel_1_6_15b_thinker_fixed",),
        "Apriel Thinker",
        Tags("<tool_calls>", "</tool_calls>", thinking=FINAL, silent=("[END FINAL RESPONSE]",), json_body=True),
        LIST,
        ("<|end|>",),
    ),
    tagged_json(
        ("apertus", "apertus_8b_instruct"),
        "Apertus",
        Tags(
            "<|tools_prefix|>",
            "<|tools_suffix|>",
            thinking=("<|inner_prefix|>", "<|inner_suffix|>"),
            json_body=True,
        ),
        KeyedCalls(listed=True, write='[{"tool": {...}}]'),
        ("<|assistant_end|>",),
    ),
    tagged_json(
        ("internlm2",),
        "InternLM 2 and 2.5",
        Tags(ACTION, "<|action_end|>", json_body=True, before_json=PLUGIN),
        read_action,
        ("<|im_end|>",),
        marks=(PLUGIN, "<|interpreter|>"),
    ),
    tagged_json(
        ("command_r7b", "cohere2moe"),
        "Command R7B, Command A, Cohere2 MoE",
        Tags(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
            silent=COHERE_FRAMES,
            json_body=True,
        ),
        COHERE,
        ("<|END_OF_TURN_TOKEN|>",),
    ),
)
