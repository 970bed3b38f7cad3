"""What is learned of a conversation: every reply and nothing else, by every chat template; told by the text."""

from __future__ import annotations

import functools
import itertools
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from family_matrix import stand_in
from stand_ins import STAND_INS, stand_in_tokenizer, with_marks
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.errors import ConfigError, RenderError
from agentgym.trainers.lessons.conversations import Conversation, conversation_of, conversation_rows
from agentgym.trainers.lessons.demonstrations import Demonstration
from agentgym.types import Message, ToolCall

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
GO = {"type": "function", "function": {"name": "go", "description": "Walks.", "parameters": {"type": "object"}}}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEXT_ENDS = (
    "<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def talk(num_replies: int, system: str = "", reasoning: str = "") -> Conversation:
    """Questions `ask0`, ... with answers `say0`, ...: every text is there once."""
    messages = [Message("system", system)] if system else []
    for number in range(num_replies):
        thought = f"{reasoning}{number}" if reasoning else None
        messages += [Message("user", f"ask{number}."), Message("assistant", f"say{number}, 12 rooms.", thought)]
    return Conversation(tuple(messages))


def learned(renderer: TemplateRenderer, rows: list[Demonstration]) -> list[str]:
    """The texts that are learned, each a run of masked ids, in order."""
    texts = []
    for row in rows:
        runs = itertools.groupby(zip(row.ids, row.mask, strict=True), key=lambda pair: pair[1])
        texts += [renderer.decode([index for index, _ in run]) for flag, run in runs if flag]
    return texts


def inline(template: str) -> TemplateRenderer:
    return renderer_for(stand_in(template, "unknown"))


@functools.cache
def markup_renderer() -> TemplateRenderer:
    """The renderer of `MARKUP` with a tokenizer to which its marks are ordinary text, as to Qwen's."""
    plain = stand_in(CHATML, "unknown")
    chat = ChatTokenizer(plain.backend, MARKUP, "", dict(plain.special_tokens), plain.stop_tokens)
    return renderer_for(chat)


def by_offsets(text: str, backend: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids and mask of ChatML text by the offsets of its characters: from behind an assistant's header to its end."""
    inside = [match.span(1) for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)]
    encoded = backend.encode(text, add_special_tokens=False)
    flags = [any(start <= begin < end for start, end in inside) for begin, _ in encoded.offsets]
    return encoded.ids, flags


@pytest.mark.parametrize("num_replies", [1, 2, 5])
@pytest.mark.parametrize("system", ["", "You play."])
def test_the_mask_of_chatml_is_that_of_character_offsets(num_replies: int, system: str) -> None:
    renderer = inline(CHATML)
    conversation = talk(num_replies, system)
    (row,) = conversation_rows(renderer, conversation)
    text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in conversation.messages)
    ids, mask = by_offsets(text.removesuffix("\n"), renderer.tokenizer.backend)
    assert (list(row.ids), list(row.mask)) == (ids, mask)


def test_a_reply_without_an_end_mark_ends_with_the_start_of_the_next_message() -> None:
    renderer = inline(NEXT_ENDS)
    (row,) = conversation_rows(renderer, talk(2))
    assert learned(renderer, [row]) == ["say0, 12 rooms.<|user|>", "say1, 12 rooms.<|user|>"]
    expected = "<sop><|user|>\nask0.<|assistant|>\nsay0, 12 rooms.<|user|>\nask1.<|assistant|>\nsay1, 12 rooms.<|user|>"
    assert renderer.decode(row.ids) == expected


def test_a_template_that_forgets_reasoning_gives_a_row_for_each_rewrite() -> None:
    renderer = inline(FORGETS)
    rows = conversation_rows(renderer, talk(3, reasoning="hm"))
    assert learned(renderer, rows) == [f"<think>hm{n}</think>say{n}, 12 rooms.<|im_end|>" for n in range(3)]
    assert len(rows) == 3 and "hm" not in renderer.decode(rows[2].ids).partition("ask2")[0]
    assert len(conversation_rows(renderer, talk(3))) == 1


def test_reasoning_that_the_prompt_opens_is_closed_where_a_reply_has_none() -> None:
    renderer = inline(THINKS)
    assert learned(renderer, conversation_rows(renderer, talk(1))) == ["\n</think>\n\nsay0, 12 rooms.<|im_end|>"]
    thought = learned(renderer, conversation_rows(renderer, talk(1, reasoning="hm")))
    assert thought == ["hm0\n</think>\n\nsay0, 12 rooms.<|im_end|>"]


def test_text_that_spells_a_mark_is_learned_as_text() -> None:
    renderer = inline(CHATML)
    reply = Message("assistant", "say <|im_end|> now")
    (row,) = conversation_rows(renderer, Conversation((Message("user", "<|im_start|>assistant\nno"), reply)))
    assert learned(renderer, [row]) == ["say <|im_end|> now<|im_end|>"]
    end = renderer.tokenizer.backend.token_to_id("<|im_end|>")
    assert [index for index, flag in zip(row.ids, row.mask, strict=True) if flag].count(end) == 1


def test_calls_are_learned_and_their_results_are_not(tokenizer_folder: Path) -> None:
    renderer = renderer_for(tokenizer_folder)
    call_mapping = {"id": "a", "type": "function", "function": {"name": "go", "arguments": {"direction": "north"}}}
    as_text = {**call_mapping, "function": {"name": "go", "arguments": '{"direction": "north"}'}}
    results = []
    for call in (call_mapping, as_text):
        messages = [
            {"role": "user", "content": "Begin."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "A wall."},
            {"role": "assistant", "content": "Blocked."},
        ]
        results.append(conversation_rows(renderer, conversation_of({"messages": messages, "tools": [GO]})))
    assert results[0] == results[1]
    called, reply = learned(renderer, results[0])
    assert json.loads(
        called.removesuffix("<|im_end|>").strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
    )
    assert '"north"' in called and "wall" not in called and reply.strip() == "Blocked.<|im_end|>"


def test_ids_of_calls_and_results_may_be_left_out_and_columns_may_be_json_text() -> None:
    call = {"type": "function", "function": {"name": "go", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Begin."},
        {"role": "assistant", "tool_calls": [call, call]},
        {"role": "tool", "content": "One."},
        {"role": "tool", "content": "Two."},
    ]
    conversation = conversation_of({"messages": json.dumps(messages), "tools": json.dumps([GO])})
    first, second = conversation.messages[1].tool_calls
    assert isinstance(first, ToolCall) and len(first.id) == 9 and first.id != second.id
    assert [(message.tool_call_id, message.name) for message in conversation.messages[2:]] == [
        (first.id, "go"),
        (second.id, "go"),
    ]
    assert [tool.name for tool in conversation.tools] == ["go"]


USER = {"role": "user", "content": "Hi."}
REPLY = {"role": "assistant", "content": "Ho."}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"mesages": []}, r"no column 'messages': did you mean 'mesages'"),
        ({"messages": 3}, r"messages is a list, got int 3"),
        ({"messages": "[{"}, "text that is not JSON"),
        ({"messages": [USER]}, "holds no reply"),
        ({"messages": [REPLY, USER]}, r"messages\[0\] is a reply to nothing"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, r"messages\[1\] is an empty reply"),
        ({"messages": [USER, {"role": "critic", "content": "x"}]}, r"messages\[1\].role is one of .*'critic'"),
        ({"messages": [USER, {**REPLY, "weight": 0}]}, r"messages\[1\] has the weight 0"),
        ({"messages": [USER, "Ho."]}, r"messages\[1\] is an object"),
        ({"messages": [USER, REPLY], "tools": [{"name": "go"}]}, r"tools\[0\] is"),
        (
            {"messages": [USER, {**REPLY, "tool_calls": [{"function": {"name": "go", "arguments": "{"}}]}]},
            r"messages\[1\].tool_calls\[0\]: the arguments are invalid JSON",
        ),
        *(
            (
                {
                    "messages": [
                        USER,
                        {**REPLY, "tool_calls": [{"function": {"name": "go", key: {"direction": "north"}}}]},
                    ]
                },
                rf'messages\[1\].tool_calls\[0\]: .*no "{key}"',
            )
            for key in ("parameters", "args", "input", "direction")
        ),
    ],
)
def test_what_nobody_can_learn_from_is_named(row: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        conversation_of(row)


def test_a_reply_that_the_template_tells_without_its_calls_is_refused() -> None:
    call = ToolCall("call00000", "go", {})
    conversation = Conversation((Message("user", "Go."), Message("assistant", "", tool_calls=(call,))))
    with pytest.raises(RenderError, match=r"messages\[1\]: .*calls of go so that none is read"):
        conversation_rows(inline(CHATML), conversation)


def called(name: str, arguments: dict[str, object], call_id: str = "call_0") -> dict[str, object]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_a_result_has_the_name_of_the_latest_call_of_its_id() -> None:
    answer = {"role": "tool", "tool_call_id": "call_0", "content": "x"}
    twice = called("a", {})
    twice["tool_calls"] = [*twice["tool_calls"], *called("b", {})["tool_calls"]]  # type: ignore[misc]
    messages = [USER, called("weather", {}), answer, called("timer", {}), answer, answer, twice, answer, answer, REPLY]
    conversation = conversation_of({"messages": messages})
    assert [message.name for message in conversation.messages if message.role == "tool"] == [
        "weather",
        "timer",
        "timer",
        "a",
        "b",
    ]


MARKUP = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments|items %}"
    "<parameter={{ key }}>\n{{ value|string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAY = {"name": "say", "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "any": {}}}}
SAY["parameters"]["properties"]["n"] = {"type": "integer"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ({"text": "a\n</parameter>\n<parameter=n>\n5"}, 'text = "a", n = 5 is read'),
        ({"any": "true"}, "any = true is read"),
        ({"any": "12"}, "any = 12 is read"),
        ({"any": True}, 'any = "True" is read'),
        ({"unknown": 3}, 'unknown = "3" is read'),
    ],
)
def test_a_call_that_would_be_learned_as_another_is_refused(arguments: dict[str, object], rendered: str) -> None:
    renderer = markup_renderer()
    conversation = conversation_of({"messages": [USER, called("say", arguments)], "tools": [SAY]})
    with pytest.raises(RenderError, match=rf"messages\[1\]: .*call of say with .* so that .*{re.escape(rendered)}"):
        conversation_rows(renderer, conversation)


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "x </parameter> y"},
        {"text": "12", "n": 5},
        {"n": 5.0, "text": "é\n"},
        {"any": "00501"},
        {"any": 5},
        {"any": "None"},
        {},
    ],
)
@pytest.mark.parametrize("tools", [[SAY], []], ids=["known", "unknown"])
def test_a_call_that_reads_back_as_it_is_is_learned(arguments: dict[str, object], tools: list[object]) -> None:
    renderer = markup_renderer()
    rows = conversation_rows(renderer, conversation_of({"messages": [USER, called("say", arguments)], "tools": tools}))
    assert len(rows) == 1


def test_a_role_that_the_template_has_not_is_named() -> None:
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts here') }}{% endif %}" + CHATML
    )
    with pytest.raises(RenderError, match=r"messages\[2\]: .*no system prompts here"):
        conversation_rows(inline(refusing), talk(1, "You play."))


# ---- real templates


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"the shared test data {SHARED} is not beside this checkout")
    target = tmp_path_factory.mktemp("tokenizers")
    for archive in sorted((SHARED / "tokenizers").glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
    return target


@pytest.fixture(scope="module")
def backend_of(tokenizers: Path) -> Callable[[str], Tokenizer]:
    """The tokenizer that stands in for the one of a template, loaded when it is first asked for."""

    @functools.cache
    def load(nearest: str) -> Tokenizer:
        whole = Tokenizer.from_file(str(tokenizers / nearest / "tokenizer.json"))
        return with_marks(whole, nearest, SHARED / "chat_templates")

    return lambda name: load(STAND_INS[name].nearest)


NO_TALK = {"NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "NVIDIA-Nemotron-Nano-v2"}
"""Templates that cannot do without tools, or tell past replies otherwise than they were prompted."""
QUICK = {"Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-V3.1", "google-gemma-3", "meta-llama-Llama-3.1-8B-Instruct"}
"""Templates of every run of the tests, of one tokenizer; the others are with the slow ones."""


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(set(STAND_INS) - NO_TALK)
    ],
)
def test_every_reply_is_learned_once_and_nothing_else_by_every_template(
    name: str, backend_of: Callable[[str], Tokenizer]
) -> None:
    source = (SHARED / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    renderer = renderer_for(stand_in_tokenizer(name, backend_of(name), source))
    conversation = talk(4)
    rows = conversation_rows(renderer, conversation)
    texts = learned(renderer, rows)
    assert [re.findall(r"say\d", text) for text in texts] == [[f"say{n}"] for n in range(4)]
    assert not any("ask" in text for text in texts)
    # Each is told behind the prompt that a rollout would show, and ends with an id that ends a reply.
    replies = iter(range(4))
    for row in rows:
        for start in _starts(row.mask):
            place = 2 * next(replies) + 1
            prompt = renderer.decode(renderer.render(conversation.messages[:place]))
            assert renderer.decode(row.ids[:start]) == prompt
    ends = [row.ids[n] for row in rows for n in range(len(row.ids)) if row.mask[n] and not any(row.mask[n + 1 : n + 2])]
    assert len(ends) == 4 and set(ends) <= set(renderer.stop_ids)


def _starts(mask: tuple[bool, ...]) -> Iterator[int]:
    return (n for n, flag in enumerate(mask) if flag and not mask[n - 1])


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_real_tokenizers_have_the_ids_and_the_mask_of_transformers_text(
    name: str, tokenizers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tokenizers / name)
    conversation = talk(3, "You play — é 日本.")
    rows = conversation_rows(renderer_for(tokenizers / name), conversation)
    dicts = [{"role": message.role, "content": message.content} for message in conversation.messages]
    expected = []
    for place in (2, 4, 6) if name == "qwen3" else (6,):  # Qwen3 tells the last reply alone with its empty reasoning
        text = theirs.apply_chat_template(dicts[: place + 1], tokenize=False).removesuffix("\n")
        ids, flags = by_offsets(text, theirs.backend_tokenizer)
        last = max(n for n, flag in enumerate(flags) if not flag)
        expected.append((ids, flags if name == "qwen2_5" else [n > last for n in range(len(ids))]))
    assert [(list(row.ids), list(row.mask)) for row in rows] == expected
