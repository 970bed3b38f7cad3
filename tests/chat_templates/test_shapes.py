"""Every shared template over a hundred conversations, beside transformers (skipped without the shared test data)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from stand_ins import STAND_INS, stand_in_tokenizer, with_marks
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agentgym.chat_templates import ChatMLRenderer, ChatTokenizer, renderer_for
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.chat_templates.jinja_template import ChatTemplate, message_dict, tool_dict
from agentgym.chat_templates.renderers.command_r import CommandRenderer
from agentgym.errors import RenderError
from agentgym.testing.contracts.conversations import CONVERSATIONS, ChatExchange, SampleConversation, exchanges
from agentgym.types import Message, ToolCall, ToolSpec

ASK = Message("user", "Where are you?")
GO_TOOL = ToolSpec(
    "go", "Walks.", {"type": "object", "properties": {"to": {"type": "string", "description": "There."}}}
)
CALL = ToolCall("000000000", "go", {"direction": "north"})
RESULT = Message("tool", "A wall.", tool_call_id="000000000", name="go")
CHATML = {"LFM2-8B-A1B", "Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-Coder"} | {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"
}
PREFIX_PRESERVING = {
    *(
        "LFM2-8B-A1B",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen3-Coder",
        "deepseek-ai-DeepSeek-V3.1",
        "deepseek-ai-DeepSeek-V3",
        "google-gemma-2-2b-it",
    ),
    *("google-gemma-3", "ibm-granite-granite-4.0", "meta-llama-Llama-3.1-8B-Instruct", "moonshotai-Kimi-K2"),
    *("meta-llama-Llama-3.3-70B-Instruct", "microsoft-Phi-3.5-mini-instruct", "microsoft-phi-4"),
}
REFUSED_ROLES = {
    "microsoft-Phi-3.5-mini-instruct": {"tool"},
    **{name: {"tool", "system"} for name in ("google-gemma-2-2b-it", "google-gemma-3")},
    **{name: {"system"} for name in STAND_INS if "DeepSeek" in name or "istral" in name},
    **{name: {"system"} for name in ("MiniMax-M2", "NVIDIA-Nemotron-Nano-v2", "Qwen3.5-4B", "openai-gpt-oss-120b")},
}


def moves_tools_and_system(exchange: ChatExchange) -> bool:
    has_more = exchange.tools or exchange.history[0].role == "system"
    return bool(has_more) and (exchange.new[-1].role == "user" or exchange.history[0].role == "system")


def has_played(exchange: ChatExchange) -> bool:
    return exchange.new[0].role == "tool" and any(message.role == "tool" for message in exchange.history)


def is_half_answered(exchange: ChatExchange) -> bool:
    return sum(message.role == "tool" for message in exchange.new) != len(exchange.reply.tool_calls)


def talks_and_calls(exchange: ChatExchange) -> bool:
    has_calls, has_results = bool(exchange.reply.tool_calls), exchange.new[0].role == "tool"
    return has_calls is not has_results or (has_calls and bool(exchange.reply.content))


def calls_twice(exchange: ChatExchange) -> bool:
    return len(exchange.reply.tool_calls) > 1


OWN_TEXT: dict[str, Callable[[ChatExchange], bool]] = {
    "Mistral-Small-3.2-24B-Instruct-2506": moves_tools_and_system,
    "mistralai-Mistral-Nemo-Instruct-2407": moves_tools_and_system,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": has_played,
    "deepseek-ai-DeepSeek-V3": has_played,
    "deepseek-ai-DeepSeek-V3.2": is_half_answered,
    "google-gemma-4-31B-it": talks_and_calls,
    "openai-gpt-oss-120b": calls_twice,
}
"""Where the template's text depends on more than what is appended; the class of each renderer says what it does."""
EVERY = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
"""Every test run compares one conversation in five, the slow ones compare all."""


@dataclass
class Base:
    """A tokenizer with the marks of all templates that it stands in for, as `tokenizers` and as transformers has it."""

    backend: Tokenizer
    theirs: PreTrainedTokenizerFast
    vocab_size: int


class Model:
    """A template with its renderer, and with transformers' rendering of it."""

    def __init__(self, name: str, base: Base, template: str) -> None:
        self.name, self.theirs = name, base.theirs
        self.tokenizer = stand_in_tokenizer(name, base.backend, template)
        # All stand-ins of a tokenizer have its ids, which take longer to read than a template.
        vars(self.tokenizer)["vocab_size"] = base.vocab_size
        self.renderer = renderer_for(self.tokenizer)

    def their_text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], **variables: Any) -> str:
        dicts = [message_dict(message, str) for message in messages]
        special = {"bos_token": STAND_INS[self.name].bos, "eos_token": STAND_INS[self.name].eos}
        options = {"add_generation_prompt": True, **special, **variables, "tokenize": False}
        tool_dicts = [tool_dict(tool, str) for tool in tools] or None
        text: str = self.theirs.apply_chat_template(
            dicts, tools=tool_dicts, chat_template=self.tokenizer.template, **options
        )
        return text

    @property
    def ends(self) -> tuple[int, ...]:
        """What ends a reply, `<|end|>` of Harmony included."""
        end = self.tokenizer.backend.token_to_id("<|end|>")
        return (*self.renderer.stop_ids, end) if end is not None else self.renderer.stop_ids

    def conversations(self) -> list[SampleConversation]:
        if isinstance(self.renderer, CommandRenderer):
            return [numbered(conversation) for conversation in CONVERSATIONS]
        return list(CONVERSATIONS)


def numbered(conversation: SampleConversation) -> SampleConversation:
    """With the ids that Command R7B gives its calls."""
    ids: dict[str, str] = {}
    for call in (call for message in conversation.messages for call in message.tool_calls):
        ids.setdefault(call.id, str(len(ids)))
    messages = [
        replace(
            message,
            tool_calls=tuple(replace(call, id=ids[call.id]) for call in message.tool_calls),
            tool_call_id=None if message.tool_call_id is None else ids.get(message.tool_call_id, "call_0"),
        )
        for message in conversation.messages
    ]
    return replace(conversation, messages=tuple(messages))


@pytest.fixture(scope="module")
def base(real_folders: Mapping[str, Path], shared: Path) -> Callable[[str], Base]:
    """Loads a tokenizer with the marks of all templates that it stands in for, once."""

    @functools.cache
    def load(nearest: str) -> Base:
        whole = Tokenizer.from_file(str(real_folders[nearest] / "tokenizer.json"))
        backend = with_marks(whole, nearest, shared / "chat_templates")
        vocab_size = ChatTokenizer(backend, "").vocab_size
        return Base(backend, PreTrainedTokenizerFast(tokenizer_object=backend), vocab_size)

    return load


@pytest.fixture(
    scope="module",
    params=[
        name if STAND_INS[name].nearest == "qwen3" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(STAND_INS)
    ],
)
def model(request: pytest.FixtureRequest, base: Callable[[str], Base], shared: Path) -> Model:
    template = (shared / "chat_templates" / f"{request.param}.jinja").read_text(encoding="utf-8")
    return Model(request.param, base(STAND_INS[request.param].nearest), template)


def test_every_shared_template_has_a_stand_in(shared: Path) -> None:
    assert {file.stem for file in (shared / "chat_templates").glob("*.jinja")} == set(STAND_INS)


@pytest.mark.long(cases=6)
def test_the_family_is_recognized_and_what_it_refuses_is_known(model: Model) -> None:
    renderer = model.renderer
    assert renderer.reply_format is FORMATS[STAND_INS[model.name].family]
    assert isinstance(renderer, ChatMLRenderer) is (model.name in CHATML)
    assert set(renderer.refusals) == REFUSED_ROLES.get(model.name, set())
    assert renderer.reads_calls
    assert (not renderer.rewrites) is (model.name in PREFIX_PRESERVING), renderer.rewrites
    assert all("line" in sentence for sentence in (*renderer.rewrites, *renderer.drops.values()))


@EVERY
def test_render_is_apply_chat_template(model: Model, every: int) -> None:
    compared = 0
    for conversation in model.conversations()[::every]:
        messages, tools = conversation.messages, conversation.tools
        try:
            text = model.their_text(messages, tools)
        except Exception as error:  # noqa: BLE001 - whatever a template raises
            with pytest.raises(RenderError) as refusal:
                model.renderer.render(messages, tools)
            assert str(error) in str(refusal.value), conversation.name
            continue
        expected = model.theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert model.renderer.render(messages, tools) == expected, conversation.name
        compared += 1
    assert compared >= 39 // every


@EVERY
def test_extend_is_what_the_template_has_behind_the_reply(model: Model, every: int) -> None:
    exact = own = 0
    for conversation in model.conversations()[::every]:
        for exchange in exchanges(conversation):
            if model.renderer.refusals.keys() & {message.role for message in exchange.new}:
                continue
            outcome = compare(model, exchange, conversation.name)
            exact += outcome == "exact"
            own += outcome == "own"
    assert exact >= (40 if every == 1 else 5)
    assert (own > 0) is (model.name in OWN_TEXT) or every > 1


def compare(model: Model, exchange: ChatExchange, name: str) -> str:
    """`exact`, or `own` where the renderer's own text is due, or `refused` by the template."""
    try:
        prompt = model.their_text(exchange.history, exchange.tools)
        whole = model.their_text([*exchange.history, exchange.reply, *exchange.new], exchange.tools)
    except Exception:  # noqa: BLE001 - whatever a template raises
        return "refused"
    encode = model.tokenizer.encode
    appended = model.renderer.extend([*encode(prompt), model.renderer.stop_ids[0]], exchange.new)
    expected = encode(whole)[-len(appended) :]
    before = encode(whole)[-len(appended) - 1]
    begins = before in model.ends or appended[0] in model.ends or model.name == "GLM-4.6"  # a role's mark ends replies
    if not (begins and appended == expected) and model.name in OWN_TEXT and OWN_TEXT[model.name](exchange):
        return "own"
    assert appended == expected, (name, model.renderer.decode(appended), whole[-400:])
    assert begins, (name, model.renderer.decode([before]))
    return "exact"


def test_a_cut_an_empty_and_a_twice_ended_reply_are_followed_by_the_same_ids(model: Model) -> None:
    renderer, encode = model.renderer, model.tokenizer.encode
    prompt = renderer.render([ASK], [GO_TOOL])
    word, call = encode("In a ca"), encode('{"name": "go", "argu')
    for new in ([ASK], [RESULT], [RESULT, ASK]):
        try:
            ended = renderer.extend([*prompt, renderer.stop_ids[0]], new)
        except RenderError as error:
            assert str(error) in renderer.refusals.values() or "must alternate" in str(error)
            continue
        for end in renderer.stop_ids:
            follows = renderer.extend([*prompt, end], new)
            assert renderer.extend([*prompt, *word, end], new) == follows
            assert renderer.extend([*prompt, *word, *call, end, end], new) == follows
            assert follows == ended or {follows[0], ended[0]} & set(renderer.stop_ids)
        cut = renderer.extend([*prompt, *word], new)
        assert renderer.extend([*prompt, *word, *call], new) == cut
        whole_end = cut[: len(cut) - len(ended)] if cut != ended else cut[:1]
        assert cut[len(cut) - len(ended) :] == ended
        assert set(whole_end) & set(model.ends)


@pytest.mark.slow
def test_a_result_of_a_megabyte_is_appended_exactly(model: Model) -> None:
    renderer = model.renderer
    if "tool" in renderer.refusals:
        with pytest.raises(RenderError, match="cannot be appended exactly"):
            renderer.extend([renderer.stop_ids[0]], [RESULT])
        return
    content = "".join(f"Line {number}: é <b> [x] {{}}\n" for number in range(45_000)).strip()
    assert len(content) > 1_000_000
    appended = renderer.extend([renderer.stop_ids[0]], [replace(RESULT, content=content)])
    whole = model.their_text(
        [ASK, Message("assistant", "", None, (CALL,)), replace(RESULT, content=content)], [GO_TOOL]
    )
    assert model.tokenizer.encode(whole)[-len(appended) :] == appended


def test_a_turn_takes_the_same_work_after_sixty_four_as_after_four(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in characters that the tokenizer and messages that the template are given."""
    renderer, work = model.renderer, []
    encode, render = ChatTokenizer.encode, ChatTemplate.render

    def counted_encode(self: ChatTokenizer, text: str) -> list[int]:
        work.append(("characters", len(text)))
        return encode(self, text)

    def counted_render(self: ChatTemplate, messages: Sequence[Any], *args: Any, **more: Any) -> str:
        work.append(("messages", len(messages)))
        return render(self, messages, *args, **more)

    new = ASK if "tool" in renderer.refusals else RESULT
    ids = renderer.render([ASK], [GO_TOOL])
    monkeypatch.setattr(ChatTokenizer, "encode", counted_encode)
    monkeypatch.setattr(ChatTemplate, "render", counted_render)
    spent = []
    for _ in range(64):
        ids += [*ids[:20], renderer.stop_ids[-1]]
        ids += renderer.extend(ids, [new])
        spent.append(list(work))
        work.clear()
    assert spent[3] == spent[63] != []
    assert sum(amount for kind, amount in spent[63] if kind == "characters") < 1000


def test_a_template_that_calls_itself_without_end_refuses_the_conversation() -> None:
    source = "{% macro kind(of) %}{{ kind(of) }}{% endmacro %}{{ kind(messages) }}"
    with pytest.raises(RenderError, match=r"refuses a conversation of roles .*recursion"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "?"}])
