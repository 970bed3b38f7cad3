"""Renders a conversation's replies: the ids around each, and the ids of the reply itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from agentgym.chat_templates.jinja_template import message_dict, tool_dict
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import RenderError
from agentgym.rollout.record.ledger import first_difference
from agentgym.testing.contracts.conversations import ASK, ChatExchange, SampleConversation, exchanges
from agentgym.types import Message

__all__ = ["Case", "cases_of", "marks_of", "spells", "with_own_ids"]

MAX_MARKS = 200
"""The number of a tokenizer's added tokens that are spelled: some have thousands of reserved ones, all alike."""


@dataclass(frozen=True)
class Case:
    """One reply of a conversation, rendered before, around and after."""

    name: str
    """The name of the conversation."""
    exchange: ChatExchange
    prompt: list[int]
    """The render of what precedes the reply."""
    whole: list[int] | None
    """The render with reply and answer; None if the template refuses that."""
    appended: list[int] | None
    """The ids that `extend` appends to a reply that was cut; None if it refuses."""
    refusal: str
    """The reason why there is no `whole`, or nothing appended."""
    said: list[int] | None
    """The ids with which the template writes the reply, its stop id included.

    None if it does not write the reply as a model would be prompted for it."""

    @property
    def keeps_prefix(self) -> bool:
        """True if the whole begins with the prompt."""
        return self.whole is not None and self.whole[: len(self.prompt)] == self.prompt


def cases_of(renderer: TemplateRenderer, conversations: Iterable[SampleConversation]) -> Iterator[Case]:
    """Yields the replies of those conversations that the renderer takes."""
    for conversation in conversations:
        for exchange in exchanges(conversation):
            try:
                prompt = renderer.render(exchange.history, exchange.tools)
            except RenderError:
                continue
            yield _case(renderer, conversation.name, exchange, prompt)


def _case(renderer: TemplateRenderer, name: str, exchange: ChatExchange, prompt: list[int]) -> Case:
    whole = appended = None
    refusal = ""
    try:
        whole = renderer.render([*exchange.history, exchange.reply, *exchange.new], exchange.tools)
        appended = renderer.extend(prompt, exchange.new)
    except RenderError as error:
        refusal = str(error)
    reply_ids = _reply_ids(renderer, exchange, prompt, whole, appended)
    return Case(name, exchange, prompt, whole, appended, refusal, reply_ids)


def _reply_ids(
    renderer: TemplateRenderer,
    exchange: ChatExchange,
    prompt: Sequence[int],
    whole: Sequence[int] | None = None,
    appended: Sequence[int] | None = None,
) -> list[int] | None:
    """Returns the reply's ids up to a stop id, if the template's own text of it continues the prompt.

    They are cut out of the render of the reply alone, or else of the `whole`, before what `extend` appends. If a prompt
    opens reasoning that the template leaves out of a reply without any, the reply begins by closing it.
    """
    if not _is_prompted(renderer, exchange):
        return None
    renders: list[tuple[Sequence[int], Sequence[int]]] = []
    try:
        alone = renderer.render([*exchange.history, exchange.reply], exchange.tools)
        renders.append((alone, renderer.extend(prompt, ())))
    except RenderError:
        pass
    if whole is not None and appended is not None:
        renders.append((whole, appended))
    for ids, tail in renders:
        start = _reply_start(renderer, prompt, ids)
        if start is None:
            continue
        if tail and list(ids[-len(tail) :]) == list(tail):
            end = tail[0] if tail[0] in renderer.stop_ids else renderer.stop_ids[0]
            ids = [*ids[: len(ids) - len(tail)], end]
        rest = ids[first_difference(prompt, ids) :]
        stop = next((at for at, index in enumerate(rest) if index in renderer.stop_ids), None)
        if stop is not None:
            return [*start, *rest[: stop + 1]]
    return None


def _is_prompted(renderer: TemplateRenderer, exchange: ChatExchange) -> bool:
    """Returns True if the history's render ends with a generation prompt; after a reply, some templates write none."""
    if exchange.history[-1].role != "assistant":
        return True
    try:
        bare, prompted = (renderer.text([ASK], exchange.tools, generation_prompt=opens) for opens in (False, True))
    except RenderError:
        return True
    return renderer.text(exchange.history, exchange.tools).endswith(prompted[first_difference(bare, prompted) :])


def _reply_start(renderer: TemplateRenderer, prompt: Sequence[int], ids: Sequence[int]) -> list[int] | None:
    """Returns what a model writes before that with which `ids` continue the prompt.

    It is the end of reasoning that only the prompt has opened, unless they begin with it. None if they continue
    something else.
    """
    think, end_think = renderer.thinking
    num_shared = first_difference(prompt, ids)
    opened = renderer.decode(prompt[num_shared:]).strip()
    if think and opened == think and renderer.decode(ids[num_shared:]).lstrip().startswith(end_think):
        return []
    if not opened or (think and "".join(opened.split()) == think + end_think):
        return []
    return renderer.tokenizer.encode(f"\n{end_think}\n\n") if think and opened == think else None


def with_own_ids(
    renderer: TemplateRenderer, conversations: Sequence[SampleConversation]
) -> tuple[SampleConversation, ...]:
    """Returns the conversations with call ids that the renderer takes: numbers, if a family counts its calls."""
    try:
        renderer.extend((), [Message("tool", "x", tool_call_id="call00001", name="go")])
        return tuple(conversations)
    except RenderError as error:
        if "tool" in renderer.refusals or "number" not in str(error):
            return tuple(conversations)
    return tuple(map(_number_calls, conversations))


def _number_calls(conversation: SampleConversation) -> SampleConversation:
    calls = [call for message in conversation.messages for call in message.tool_calls]
    ids = {call.id: str(number) for number, call in enumerate(calls)}
    messages = [
        replace(
            message,
            tool_calls=tuple(replace(call, id=ids[call.id]) for call in message.tool_calls),
            tool_call_id=None if message.tool_call_id is None else ids.get(message.tool_call_id, "call_0"),
        )
        for message in conversation.messages
    ]
    return replace(conversation, messages=tuple(messages))


def marks_of(renderer: TemplateRenderer) -> dict[str, int]:
    """Returns the ids by text of the added tokens that a template, a reply or a special role uses, and some others."""
    source = renderer.tokenizer.template + renderer.tokenizer.tool_template
    added = renderer.tokenizer.backend.get_added_tokens_decoder()
    used = {
        token.content: index
        for index, token in added.items()
        if token.special or token.content in source or token.content in renderer.reply_format.marks
    }
    ordered = sorted(used, key=lambda text: (text not in source, used[text]))
    return {text: used[text] for text in ordered[:MAX_MARKS] if len(text.strip()) > 1}


def spells(conversation: SampleConversation, marks: Iterable[str]) -> bool:
    """Returns True if a text of the conversation spells one of the marks."""
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    for message in conversation.messages:
        message_dict(message, collect)
    for tool in conversation.tools:
        tool_dict(tool, collect)
    return any(mark in text for text in texts for mark in marks)
