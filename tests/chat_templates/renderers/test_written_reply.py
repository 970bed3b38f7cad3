"""A reply that was written elsewhere has the ids that a model would sample to say it, or is refused."""

from __future__ import annotations

import json
import unicodedata

import pytest

from agentgym.chat_templates import ChatTokenizer, TemplateRenderer
from agentgym.chat_templates.renderers.written_reply import encode_written_reply
from agentgym.errors import RenderError
from agentgym.testing.contracts.conversations import CONVERSATIONS, SampleConversation
from agentgym.types import Message, ToolCall

ASK = Message("user", "Where are you?")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ BODY }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}"
)
HAS_REPLIES = [
    conversation
    for conversation in CONVERSATIONS
    if any(message.role == "assistant" for message in conversation.messages[1:])
]


def of_template(tiny: ChatTokenizer, body: str = "m.content", prompt: str = "") -> TemplateRenderer:
    template = CHATML.replace("BODY", body).replace("PROMPT", prompt)
    return TemplateRenderer(ChatTokenizer(tiny.backend, template, "", dict(tiny.special_tokens), tiny.stop_tokens))


def calls_of(message: Message) -> list[object]:
    """Names and arguments, composed as the small tokenizer composes text."""
    calls = [(call.name, dict(call.arguments)) for call in message.tool_calls if isinstance(call, ToolCall)]
    return [json.loads(unicodedata.normalize("NFC", json.dumps(call, ensure_ascii=False))) for call in calls]


@pytest.mark.parametrize("conversation", HAS_REPLIES, ids=lambda conversation: conversation.name)
def test_every_reply_reads_back_and_stands_behind_its_prompt(
    conversation: SampleConversation, renderer: TemplateRenderer
) -> None:
    for place, reply in enumerate(conversation.messages):
        if reply.role != "assistant" or not place:
            continue
        history, tools = conversation.messages[:place], conversation.tools
        ids, prompt = encode_written_reply(renderer, history, reply, tools), renderer.render(history, tools)
        parsed_reply = renderer.parse(ids, tools, prompt)
        assert parsed_reply.content.split() == unicodedata.normalize("NFC", reply.content).split()
        assert calls_of(parsed_reply) == calls_of(reply)
        assert ids[-1] in renderer.stop_ids and not set(ids[:-1]) & set(renderer.stop_ids)
        # the template's own text of the conversation up to the reply, however its pieces were encoded
        whole = renderer.text([*history, reply], tools, generation_prompt=False)
        assert unicodedata.normalize("NFC", whole).startswith(renderer.decode([*prompt, *ids]))


def test_a_reply_goes_on_where_the_prompt_has_thought_nothing(tiny: ChatTokenizer) -> None:
    renderer = of_template(tiny, prompt="<think>\n\n</think>\n\n")
    ids = encode_written_reply(renderer, [ASK], Message("assistant", "In a cave."))
    assert renderer.decode(ids) == "In a cave.<|im_end|>"
    with pytest.raises(RenderError, match=r"leaves reasoning out.*take that out of the messages"):
        encode_written_reply(renderer, [ASK], Message("assistant", "In a cave.", "Dark."))


def test_a_system_prompt_that_moves_does_not_change_the_reply(tiny: ChatTokenizer) -> None:
    moving = "m.content ~ ('|' ~ messages[0].content if loop.last and messages[0].role == 'system' else '')"
    renderer = of_template(tiny, moving)
    ids = encode_written_reply(renderer, [Message("system", "You play."), ASK], Message("assistant", "In a cave."))
    assert renderer.decode(ids) == "In a cave.<|im_end|>"


@pytest.mark.parametrize(
    ("body", "reply", "message"),
    [
        ("m.content", Message("assistant", "", tool_calls=(ToolCall("a", "go", {}),)), "calls of go so that none is"),
        (
            "m.content|replace('cave', 'barn')",
            Message("assistant", "A cave."),
            "'A cave.' otherwise: 'A barn.' is read",
        ),
    ],
)
def test_a_template_that_leaves_something_out_is_refused(
    tiny: ChatTokenizer, body: str, reply: Message, message: str
) -> None:
    with pytest.raises(RenderError, match=message):
        encode_written_reply(of_template(tiny, body), [ASK], reply)
