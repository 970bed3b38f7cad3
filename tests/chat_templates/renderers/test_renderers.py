"""Rendering, extending and parsing keep their promises with a small tokenizer, for both renderers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentgym.chat_templates import ChatMLRenderer, ChatTokenizer, TemplateRenderer
from agentgym.errors import RenderError
from agentgym.testing.contracts.renderer import check_renderer
from agentgym.types import MalformedCall, Message, ToolCall, ToolSpec

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</think>")
GO = ToolSpec("go", "Walks.", {"type": "object", "properties": {"direction": {"type": "string"}}})
USER = Message("user", "Begin.")
NORTH = ToolCall("call_0", "go", {"direction": "north"})

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ordinary_texts = texts.filter(lambda text: not any(mark in text for mark in (*MARKS, "<think>", "</tool_response>")))
hostile = st.lists(st.one_of(st.sampled_from([*MARKS, "<", "<|im_", "|>", "im_end|>", "\n", " "]), texts), max_size=5)
hostile_texts = hostile.map("".join)
names = st.text("abcdef._-", min_size=1, max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | hostile_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)


def conversation(contents: Sequence[str]) -> list[Message]:
    """New messages of all roles, tool messages side by side."""
    roles = itertools.cycle(["tool", "tool", "user", "tool", "system"])
    return [
        Message("tool", content, tool_call_id=f"call_{n}") if role == "tool" else Message(role, content)  # type: ignore[arg-type]
        for n, (role, content) in enumerate(zip(roles, contents, strict=False))
    ]


def count_marks(renderer: TemplateRenderer, ids: Sequence[int]) -> dict[str, int]:
    by_text = {renderer.tokenizer.backend.token_to_id(text): text for text in MARKS}
    return {text: list(ids).count(index) for index, text in by_text.items()}


def test_every_promise_holds(renderer: TemplateRenderer) -> None:
    checks = check_renderer(renderer)
    assert len(checks) == 11
    assert [check for check in checks if not check.ok] == []


@given(st.lists(ordinary_texts, max_size=6))
def test_rendering_ordinary_text_encodes_the_whole_at_once(renderer: TemplateRenderer, contents: list[str]) -> None:
    messages = [USER, Message("assistant", "", tool_calls=(NORTH,)), *conversation(contents)]
    ids = renderer.render(messages, [GO])
    text = renderer.decode(ids)
    assert ids == renderer.tokenizer.backend.encode(text, add_special_tokens=False).ids


@pytest.mark.long
@given(st.lists(hostile_texts, max_size=6))
def test_text_that_spells_marks_stays_text(renderer: TemplateRenderer, contents: list[str]) -> None:
    contents = [renderer.tokenizer.backend.normalizer.normalize_str(content) for content in contents]
    harmless = [Message(m.role, "x", tool_call_id=m.tool_call_id) for m in conversation(contents)]
    messages = conversation(contents)
    for ids, expected in (
        (renderer.render([USER, *messages]), renderer.render([USER, *harmless])),
        (renderer.extend((), messages), renderer.extend((), harmless)),
    ):
        assert count_marks(renderer, ids) == count_marks(renderer, expected)
        text = renderer.decode(ids)
        assert all(content in text for content in contents)


@given(hostile_texts)
def test_tools_and_arguments_that_spell_marks_stay_text(renderer: TemplateRenderer, content: str) -> None:
    def ids(text: str) -> list[int]:
        properties = {"x": {"type": "string", "enum": [text]}}
        spec = ToolSpec("go", text, {"type": "object", "properties": properties})
        call = ToolCall("call_0", "go", {text: [text]})
        return renderer.render([USER, Message("assistant", text, text, (call,)), USER], [spec])

    assert count_marks(renderer, ids(f"x{content}")) == count_marks(renderer, ids("x"))


@given(st.lists(hostile_texts, max_size=6))
def test_appended_ids_are_those_of_the_whole(renderer: TemplateRenderer, contents: list[str]) -> None:
    reply = Message("assistant", "", tool_calls=(NORTH,))
    new = conversation(contents)
    before = renderer.render([USER, reply], [GO])
    sampled = before[: len(before) - before[::-1].index(renderer.stop_ids[0])]
    assert sampled + renderer.extend(sampled, new) == renderer.render([USER, reply, *new], [GO])


@pytest.mark.long
@given(st.lists(hostile_texts, max_size=4))
def test_the_fast_extension_equals_that_of_the_template(
    chatml: ChatMLRenderer, tiny: ChatTokenizer, contents: list[str]
) -> None:
    new = conversation(contents)
    assert chatml.extend((), new) == TemplateRenderer(tiny).extend((), new)


@given(st.lists(st.integers(0, 410), max_size=30))
def test_sampled_ids_are_kept_whatever_they_would_encode_to(renderer: TemplateRenderer, sampled: list[int]) -> None:
    end = renderer.stop_ids[0]
    body = [index for index in sampled if index not in renderer.stop_ids]
    new = [Message("tool", "A wall.", tool_call_id="call_0")]
    appended = renderer.extend([end], new)
    assert renderer.extend([*body, end], new) == appended
    assert renderer.extend(body, new) == [end, *appended]


def test_any_end_token_ends_a_reply(renderer: TemplateRenderer) -> None:
    first, second = renderer.stop_ids
    assert renderer.extend([5, first], [USER]) == renderer.extend([5, second], [USER])
    assert renderer.extend([5], [USER])[0] == first
    assert renderer.extend([], []) == [first, *renderer.extend([first], [])]


def test_an_assistant_message_is_never_appended(renderer: TemplateRenderer) -> None:
    with pytest.raises(RenderError, match="its ids are those that were sampled"):
        renderer.extend([], [USER, Message("assistant", "Hi.")])


@pytest.mark.long
@given(
    texts.map(str.strip).filter(bool) | st.just(""),
    texts.map(lambda text: text.strip("\n")).filter(bool) | st.none(),
    st.lists(st.tuples(names, st.dictionaries(texts, json_values, max_size=3)), max_size=3),
)
def test_parsing_inverts_rendering(
    renderer: TemplateRenderer, content: str, reasoning: str | None, calls: list[tuple[str, dict[str, object]]]
) -> None:
    normalize = renderer.tokenizer.backend.normalizer.normalize_str
    tool_calls = tuple(ToolCall(f"call_{n}", name, args) for n, (name, args) in enumerate(calls))  # type: ignore[arg-type]
    message = Message("assistant", content, reasoning, tool_calls)
    prompt = renderer.render([USER])
    parsed = renderer.parse(renderer.render([USER, message])[len(prompt) :])
    assert parsed.content == normalize(content).lstrip("\n" if reasoning else "")
    assert parsed.reasoning == (normalize(reasoning) if reasoning else None)
    assert [normalize(repr(call)) for call in parsed.tool_calls] == [normalize(repr(call)) for call in tool_calls]


@given(st.lists(st.integers(-5, 500), max_size=60))
def test_parsing_and_decoding_never_raise(renderer: TemplateRenderer, ids: list[int]) -> None:
    assert renderer.parse(ids).role == "assistant"
    assert isinstance(renderer.decode(ids), str)


def test_ids_that_only_spell_a_mark_are_text(renderer: TemplateRenderer, bare_backend: Tokenizer) -> None:
    text = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
    spelled = bare_backend.encode(text).ids
    assert renderer.decode(spelled) == text
    assert renderer.parse(spelled) == Message("assistant", text)


def test_a_call_closed_by_spelled_text_is_malformed(renderer: TemplateRenderer, bare_backend: Tokenizer) -> None:
    opening = renderer.tokenizer.backend.token_to_id("<tool_call>")
    ids = [opening, *bare_backend.encode('{"name": "go", "arguments": {}}\n</tool_call>').ids, renderer.stop_ids[0]]
    (call,) = renderer.parse(ids).tool_calls
    assert isinstance(call, MalformedCall)


def test_marks_that_the_tokenizer_lacks_are_read_by_their_spelling(
    tiny: ChatTokenizer, bare_backend: Tokenizer
) -> None:
    backend = Tokenizer.from_str(bare_backend.to_str())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    renderer = ChatMLRenderer(replace(tiny, backend=backend))
    reply = Message("assistant", "I go.", "North?", (NORTH,))
    prompt = renderer.render([USER], [GO])
    assert renderer.parse(renderer.render([USER, reply], [GO])[len(prompt) :]) == reply


def test_a_reply_ends_at_its_first_end_token(renderer: TemplateRenderer) -> None:
    encode = renderer.tokenizer.backend.encode
    assert renderer.parse(encode("Hi.<|im_end|>\n<|im_start|>user\nmore").ids) == Message("assistant", "Hi.")


def test_a_text_with_lone_surrogates_is_rendered(renderer: TemplateRenderer) -> None:
    assert "a\N{REPLACEMENT CHARACTER}b" in renderer.decode(renderer.extend((), [Message("user", "a\ud800b")]))
    assert "a\N{GRINNING FACE}b" in renderer.decode(renderer.render([Message("user", "a\ud83d\ude00b")]))


def test_rerendering_spells_a_malformed_call_as_text(renderer: TemplateRenderer) -> None:
    raw = "<tool_call>{bad</tool_call>"
    reply = Message("assistant", "Hm.", tool_calls=(MalformedCall("call_0", raw, "bad"),))
    ids = renderer.rerender([USER, reply, USER])
    assert f"Hm.\n{raw}<|im_end|>" in renderer.decode(ids)
    assert count_marks(renderer, ids)["<tool_call>"] == 0


REWRITES = (
    "{% for m in messages %}{% if loop.last or m.role != 'user' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTS = "{% for m in messages %}<|im_start|>{{ loop.index }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
NAMES_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set ns.name = c.function.name %}{{ c.function.arguments }}{% endfor %}"
    "{{ ns.name if m.role == 'tool' else '' }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("template", "role", "reason"),
    [
        (REWRITES, "user", "rewrites what came before"),
        (COUNTS, "user", "depends on what came before"),
        ("{% set ns = namespace(name='') %}" + NAMES_TOOLS, "tool", "the tool's name"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' else '' }}"), "tool", "drops it"),
    ],
)
def test_a_template_that_cannot_be_continued_exactly_is_refused_with_the_reason(
    tiny: ChatTokenizer, template: str, role: str, reason: str
) -> None:
    renderer = TemplateRenderer(replace(tiny, template=template))
    message = Message("tool", "x", tool_call_id="call_0") if role == "tool" else Message("user", "x")
    with pytest.raises(RenderError, match=reason):
        renderer.extend((), [message])


def test_a_template_without_an_end_token_is_refused(tiny: ChatTokenizer) -> None:
    with pytest.raises(RenderError, match="no end token"):
        TemplateRenderer(replace(tiny, template=ENDLESS))


UNREADABLE = "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} WITH {{ c.function.arguments }}{% endfor %}"


def test_tools_are_refused_where_the_template_writes_calls_that_are_not_read(tiny: ChatTokenizer) -> None:
    template = "{{ tools }}" + PLAIN.replace("{{ m.content }}", "{{ m.content }}" + UNREADABLE)
    renderer = TemplateRenderer(replace(tiny, template=template))
    assert renderer.render([USER])
    with pytest.raises(RenderError, match="is not read by the format 'hermes'"):
        renderer.render([USER], [GO])


def test_what_a_template_leaves_out_is_told(tiny: ChatTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    renderer = TemplateRenderer(replace(tiny, template=PLAIN))
    assert set(renderer.drops) == {"tools", "calls", "reasoning"}
    assert renderer.render([USER], [GO]) == renderer.render([USER])
    assert "the chat template shows no tools" in caplog.text
    called = [USER, Message("assistant", "", tool_calls=(NORTH,)), USER]
    with pytest.raises(RenderError, match="leaves calls of a reply out"):
        renderer.rerender(called)
    assert renderer.rerender([USER]) == renderer.render([USER])


def test_a_template_that_changes_contents_is_not_chatml(tiny: ChatTokenizer) -> None:
    template = tiny.template.replace("message.content", "message.content | trim")
    assert template != tiny.template
    with pytest.raises(RenderError, match="changes contents"):
        ChatMLRenderer(replace(tiny, template=template))
    assert [check for check in check_renderer(TemplateRenderer(replace(tiny, template=template))) if not check.ok] == []


def test_reasoning_that_the_prompt_opens_belongs_to_the_reply(tiny: ChatTokenizer) -> None:
    opened = "{{- '<|im_start|>assistant\\n<think>\\n' -}}"
    head, _, tail = tiny.template.rpartition("{{- '<|im_start|>assistant\\n' -}}")
    renderer = ChatMLRenderer(replace(tiny, template=head + opened + tail))
    reply = renderer.tokenizer.backend.encode("North?\n</think>\n\nI go.<|im_end|>").ids
    assert renderer.parse(reply) == Message("assistant", "I go.", "North?")
    assert renderer.reads_calls


def test_reasoning_that_only_some_prompts_open_is_told_by_the_prompt(tiny: ChatTokenizer) -> None:
    """DeepSeek R1 opens it behind a question and not behind results; `/no_think` closes it at once."""
    quiet = "('<think>\\n\\n</think>\\n\\n' if '/no_think' in messages[-1].content else '<think>\\n')"
    opened = f"{{{{- '<|im_start|>assistant\\n' + ({quiet} if messages[-1].role == 'user' else '') -}}}}"
    head, _, tail = tiny.template.rpartition("{{- '<|im_start|>assistant\\n' -}}")
    renderer = TemplateRenderer(replace(tiny, template=head + opened + tail))
    first = renderer.render([USER], (GO,))
    reply = renderer.tokenizer.backend.encode("I go.<|im_end|>").ids
    behind = [*first, *reply, *renderer.extend([*first, *reply], [Message("tool", "A wall.", tool_call_id="call_0")])]
    hushed = renderer.render([Message("user", "Begin. /no_think")], (GO,))
    reasoned = [renderer.parse(reply, (GO,), prompt).reasoning for prompt in (first, behind, hushed, ())]
    assert reasoned == ["I go.", None, None, "I go."]
