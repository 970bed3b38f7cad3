"""A renderer that drives a model's own Jinja template, exactly, turn by turn."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from agentgym.chat_templates.formats.hermes import HERMES
from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.jinja_template import ChatTemplate, message_dict, tool_dict
from agentgym.chat_templates.marks import Marks, pick_guard
from agentgym.chat_templates.renderers.prompt_end import PromptEnd, opens_reasoning
from agentgym.chat_templates.renderers.template_probe import (
    CALLING,
    PLAIN_CALL,
    PROBE,
    TOOL,
    USER,
    begins_each_result,
    call_refusal_of,
    drops_of,
    dummy_replies,
    ends_calls_alone,
    names_by_id,
    probe_tools_of,
    refusals_of,
    reply_text,
    result_needs_of,
    rewrites_of,
    shared_start,
    takes_nameless,
    unread_because,
    written_arguments,
)
from agentgym.chat_templates.reply_reader import ReplyReader
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.errors import RenderError
from agentgym.types import JSON, Message, ToolCall, ToolSpec

__all__ = ["TemplateRenderer"]

_log = logging.getLogger(__name__)


class TemplateRenderer:
    """Renders with the tokenizer's own template and parses replies in a family's format. Implements `Renderer`.

    `render` returns the same ids as `apply_chat_template(add_generation_prompt=True)`, except that text of messages and
    tools which spells a mark (`<|im_end|>`, `<tool_call>`) stays plain text. `extend` renders the new messages after a
    fixed dummy conversation and keeps what follows its reply, so its cost does not grow with the history.
    What the template does to older replies (dropping their reasoning) does not matter: they stay as sampled.

    With a template whose text after a reply depends on what came before, it still renders; `refusals` holds the roles
    for which `extend` raises RenderError, and why. A subclass is a family whose template needs more than that.
    `variables` are template variables (`enable_thinking=False`).
    """

    _opening_ids: Collection[int] = frozenset()

    keeps_what_was_shown = False
    """True if `extend` gives what the template puts after a bare conversation even if more precedes it. It is for a
    family whose class describes what its template moves or numbers, and why the row is right as it is."""

    unnamed = ""
    """The template's name for the tool of a result whose call could not be read; if empty, such a result is refused."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        reply_format: ReplyFormat = HERMES,
        variables: Mapping[str, JSON] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.reply_format = reply_format
        seen = {**tokenizer.special_tokens, **(variables or {})}
        self._template = ChatTemplate(tokenizer.template, seen)
        self._tool_template = ChatTemplate(tokenizer.tool_template, seen) if tokenizer.tool_template else self._template
        self.marks = Marks(tokenizer, reply_format.marks)
        """The encoder of the text that the template writes."""
        self.text_arguments = self._wants_text()
        """True if the template takes the arguments of calls only as JSON text."""
        self.probe_tools = probe_tools_of(self)
        self._end = self._measure_end()
        self._call_end = self._measure_call_end()
        self._stop_ids = self._find_stops()
        self._opening_ids = self._find_openings()
        inner = ends_calls_alone(self, self._call_end, self._end)
        self._inner_ids = frozenset([self.marks.ids[self._call_end]] if inner else [])
        self._reader = ReplyReader(tokenizer, reply_format, self._stop_ids)
        self._prompt_end = PromptEnd(tokenizer, self.marks, reply_format.thinking)
        self._in_reasoning = opens_reasoning(self.text([USER], self.probe_tools), reply_format.thinking)
        self.refusals: Mapping[str, str] = refusals_of(self)
        """The reason why `extend` cannot be exact for a new message, by role."""
        self._takes_nameless = takes_nameless(self)
        self.result_needs = result_needs_of(self)
        """The fields that `extend` requires of a tool message: of `name` and `tool_call_id`, those that it writes."""
        self.names_by_id = "name" in self.result_needs and names_by_id(self)
        """True if the template names a result whose call it does not find by the call's id."""
        self.rewrites: tuple[str, ...] = rewrites_of(self)
        """Sentences on how the text of a longer conversation differs from that of the shorter one that it continues. A
        row that was extended keeps what was shown; a history that is rendered again loses it."""
        self.drops: Mapping[str, str] = drops_of(self)
        """The omissions of the template, each with a sentence: `tools`, `calls`, `further calls` (all but one of a
        reply), `text with calls`, `calls with text`, `reasoning`, and `arguments` if what it writes of them cannot
        be read back, though sampled calls are read."""
        self.unread = self._find_unread()
        """The reason why the calls that the template writes are not read; empty if they are."""
        if not self._reads(Message("assistant", PROBE), self.probe_tools, self._reader):
            _log.warning("parsing leaves what frames replies in the template of %r in their text", tokenizer.name)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The id that the template puts after a reply, then the model's other end ids."""
        return self._stop_ids

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id that the tokenizer has."""
        return self.tokenizer.vocab_size

    @property
    def thinking(self) -> tuple[str, str]:
        """The texts that open and close the model's reasoning."""
        return self.reply_format.thinking

    @property
    def reads_calls(self) -> bool:
        """True if `parse` reads the calls that the template writes; if not, `render` refuses tools."""
        return not self.unread

    @property
    def source(self) -> str:
        """The template that conversations with tools are rendered with."""
        return self._tool_template.source

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Returns the ids of the whole conversation, ending with the generation prompt."""
        if tools and not self.reads_calls:
            raise RenderError(f"{self.tokenizer.name!r} cannot be given tools: {self.unread}")
        if tools and "tools" in self.drops:
            _log.warning("%r: %s", self.tokenizer.name, self.drops["tools"])
        guard = self.guard_for(messages, tools)
        return self.marks.encode(self.text(messages, tools, guard=guard), guard)

    def rerender(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Returns the prompt for the next reply if the template may rewrite history (`history="rerender"`).

        The ids need not begin with those sampled before. Raises RenderError if the template leaves out earlier calls.
        """
        for message in messages:
            for kind, min_calls in (("calls", 1), ("further calls", 2)):
                if kind in self.drops and len(message.tool_calls) >= min_calls:
                    raise RenderError(f"{self.tokenizer.name!r}: {self.drops[kind]}")
        return self.render(messages, tools)

    def extend(self, ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """Returns the ids to append to `ids`; raises RenderError for roles in `refusals`.

        A reply that ends with any of `stop_ids` is complete; any other is a cut reply, which gets the template's end.
        """
        return self._new_ids(ids, new_messages, (USER,))

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSpec] = (), prompt: Sequence[int] = (), stop: str = ""
    ) -> Message:
        """Returns the reply as a message, up to its first stop id, or to the end of the stop string `stop`.

        `tools` are those that the model was shown, `prompt` is what it was sampled on: by default, a question.
        """
        return self._reader.parse(ids, ReplyContext(tools, self.in_reasoning(prompt)), stop)

    def in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Returns True if a reply to the prompt begins inside reasoning, which is all that `parse` reads of it."""
        opened = self._prompt_end.opens(prompt)
        return self._in_reasoning if opened is None else opened

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the ids' text, special tokens included; ids out of range give none."""
        return self._reader.decode(ids)

    def call_grammar(self, tools: Sequence[ToolSpec]) -> str:
        """Returns the grammar that holds calls to the schemas (`Sampling.grammar`); raises RenderError without one."""
        grammar = self.reply_format.grammar
        if grammar is None:
            raise RenderError(f"the format {self.reply_format.name} says no grammar for its calls: leave them free")
        return grammar.structural_tag(tools)

    def can_read(self, reply_format: ReplyFormat, call: Message = CALLING) -> bool:
        """Returns True if a format reads the calls that the template writes."""
        return self._reads(call, (TOOL,), ReplyReader(self.tokenizer, reply_format, self._stop_ids))

    def prepare(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the messages in the form that the template takes; unchanged, unless the family overrides this."""
        return messages

    def dummies(self, new_messages: Sequence[Message]) -> Iterator[Message]:
        """Yields replies for `new_messages` to follow, the likeliest first; the first one that is shown counts."""
        return dummy_replies(new_messages)

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        guard: str = "",
        generation_prompt: bool = True,
    ) -> str:
        """Returns the template's text of a conversation; `guard` goes inside every mark that a message spells."""

        def clean(text: str) -> str:
            return self.marks.guard(text, guard) if guard else text

        dicts = [message_dict(each, clean, text_arguments=self.text_arguments) for each in self.prepare(messages)]
        tool_dicts = [tool_dict(tool, clean) for tool in tools]
        template = self._tool_template if tools else self._template
        return template.render(dicts, tool_dicts, generation_prompt=generation_prompt)

    def after_reply(
        self,
        new_messages: Sequence[Message],
        history: Sequence[Message] = (USER,),
        tools: Sequence[ToolSpec] | None = None,
        guard: str = "",
    ) -> str:
        """Returns what the template puts after a reply to `history` that `new_messages` follow, its end token first."""
        tools = self.probe_tools if tools is None else tools
        end = self._call_end if new_messages and new_messages[0].role == "tool" else self._end
        refusal: RenderError | None = None
        for reply in self.dummies(new_messages):
            try:
                text = self.text([*history, reply, *new_messages], tools, guard=guard)
            except RenderError as error:
                refusal = refusal or error
                continue
            start = self._end_index(text, end)
            if start is not None:
                return text[start:]
        dropped = RenderError(f"the chat template of {self.tokenizer.name!r} drops the reply or its end {end!r}")
        raise refusal or dropped

    def _new_ids(self, ids: Sequence[int], new_messages: Sequence[Message], history: Sequence[Message]) -> list[int]:
        """Returns what to append to `ids`, which end with a reply to a conversation that prompts like `history`."""
        self._check_new(new_messages)
        messages_with_names = new_messages
        if "name" in self.result_needs:
            messages_with_names = [replace(each, name=each.name or self._stand_in_name(each)) for each in new_messages]
        guard = self.guard_for(messages_with_names)
        text = self.after_reply(messages_with_names, history, guard=guard)
        return self._ids_to_append(ids, self.marks.encode(text, guard))

    def _end_index(self, text: str, end: str) -> int | None:
        """Returns the end of the reply with `PROBE` in it, or None: the first mark if only messages end replies."""
        probe = text.find(PROBE)
        if probe < 0 or self.marks.ids.get(end) not in self._opening_ids:
            start = text.find(end, probe)
            return start if probe >= 0 and start >= 0 else None
        position = probe
        for part, index in self.marks.split(text[probe:]):
            if index is not None and part not in self.reply_format.marks:
                return position
            position += len(part)
        return None

    def _check_new(self, new_messages: Sequence[Message]) -> None:
        for message in new_messages:
            if message.role == "assistant":
                raise RenderError("an assistant message is not appended: its ids are those that were sampled")
            if message.role in self.refusals:
                raise RenderError(self.refusals[message.role])
            missing = [need for need in self.result_needs if message.role == "tool" and not getattr(message, need)]
            if missing and not (missing == ["name"] and self._may_be_nameless(message)):
                what = " and ".join(sorted(missing)).replace("name", "the tool's name")
                raise RenderError(f"the chat template writes {what} before a result; give the tool message its own")

    def _may_be_nameless(self, message: Message) -> bool:
        return bool(self._stand_in_name(message)) or (self._takes_nameless and not self.names_by_id)

    def _stand_in_name(self, message: Message) -> str | None:
        """Returns the template's name for the tool of a result without a name, or None if it has none."""
        if message.role != "tool":
            return None
        return self.unnamed or (message.tool_call_id if self.names_by_id else None)

    def _ids_to_append(self, ids: Sequence[int], appended: list[int]) -> list[int]:
        """Returns what to append to `ids` of `appended`, which begins with the reply's end."""
        last = ids[-1] if ids else -1
        if last not in self._stop_ids:
            return self.marks.encode(self._closing(ids)) + appended
        begins_next = appended[0] in self._opening_ids or self.marks.ids[self._end] in self._opening_ids
        begins_next = begins_next or last in self._inner_ids
        return appended[1:] if last == appended[0] or not begins_next else appended

    def _closing(self, ids: Sequence[int]) -> str:
        """Returns what the template puts between the text of a reply and its end, if `ids` lack it."""
        return "" if ids and self.decode(ids[-1:]).endswith(self._before_end) else self._before_end

    def guard_for(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """Returns the `guard` for `text` and `marks.encode`: a character if some text spells a mark, else empty."""
        texts: list[str] = []

        def collect(text: str) -> str:
            texts.append(text)
            return text

        for message in messages:
            message_dict(message, collect)
        for tool in tools:
            tool_dict(tool, collect)
        return "" if all(map(self.marks.is_plain, texts)) else pick_guard(texts)

    def _wants_text(self) -> bool:
        """Returns True if calls are refused with arguments as they are, and taken with their JSON text."""
        self.text_arguments = False
        self.text_arguments = bool(call_refusal_of(self))
        return self.text_arguments and not call_refusal_of(self)

    def _measure_end(self) -> str:
        """Returns the mark that the template puts after a reply: a known end token, or else the first mark."""
        text = self.text([USER, Message("assistant", PROBE), USER], self.probe_tools)
        _, probe, after = text.partition(PROBE)
        if not probe:
            raise RenderError(f"the chat template of {self.tokenizer.name!r} drops what the assistant said")
        between = self.marks.split(after.partition(USER.content)[0])
        end_marks = {*self.tokenizer.stop_tokens, *self.reply_format.ends}
        marks = [at for at, (part, index) in enumerate(between) if index is not None]
        mark = next((at for at in marks if between[at][0] in end_marks), marks[0] if marks else None)
        before = "".join(part for part, _ in between[:mark])
        is_bare = not any(index is None and part.strip() for part, index in between[:mark])
        if mark is None or not (is_bare or self.reply_format.parse(PROBE + before).content.strip() == PROBE):
            raise RenderError(
                f"the chat template of {self.tokenizer.name!r} puts no end token right after a reply (it puts "
                f"{after[:40]!r}), so a reply cannot be continued exactly"
            )
        self._before_end = before
        return between[mark][0]

    def _measure_call_end(self) -> str:
        """Returns the mark that the template puts after a reply with calls which results follow."""
        result = Message("tool", "Qv7result", tool_call_id="000000000", name=TOOL.name)
        for reply in self.dummies([result]):
            try:
                alone = self.text([USER, reply], self.probe_tools, generation_prompt=False)
                whole = self.text([USER, reply, result], self.probe_tools)
            except RenderError:
                continue
            if PROBE not in whole or not whole.find(PROBE) < whole.find(result.content):
                continue
            between = self.marks.split(whole.partition(PROBE)[2].partition(result.content)[0])
            ends = (self._end, *self.tokenizer.stop_tokens, *self.reply_format.ends)
            for part, index in between:
                if index is not None and part in ends:
                    return part
            shared = shared_start(alone, whole)
            pieces = self.marks.split(shared.partition(PROBE)[2].rstrip())
            if pieces and pieces[-1][1] is not None and pieces[-1][0] not in self.reply_format.marks:
                return pieces[-1][0]
            behind = self.marks.split(whole[len(shared) :].partition(result.content)[0])
            first = next((part for part, index in behind if index is not None), None)
            if first is not None:
                return first
        return self._end

    def _find_unread(self) -> str:
        """Returns `unread`; if only some arguments cannot be read, adds them to `drops` instead."""
        is_read = "calls" in self.drops or self.can_read(self.reply_format)
        if not is_read and self.can_read(self.reply_format, PLAIN_CALL):
            self.drops, is_read = {**self.drops, "arguments": written_arguments(self)}, True
        return "" if is_read else unread_because(self, self._end, self.reply_format.name)

    def _find_stops(self) -> tuple[int, ...]:
        spelled = [end for end in self.reply_format.ends if end in self.source]
        texts = dict.fromkeys([self._end, self._call_end, *self.tokenizer.stop_tokens, *spelled])
        stops = [self.tokenizer.backend.token_to_id(text) for text in texts]
        return tuple(dict.fromkeys(index for index in stops if index is not None))

    def _find_openings(self) -> Collection[int]:
        """Returns the stop ids that begin the next message (`<|observation|>`) rather than end the reply."""
        first = self.marks.split(self.text([USER], self.probe_tools).partition(USER.content)[0])
        before = [part for part, index in first if index is not None]
        openings = {end for end in (self._end, self._call_end) if before and end == before[-1]}
        if self._call_end != self._end and (self._end in openings or begins_each_result(self, self._call_end)):
            openings.add(self._call_end)
        return frozenset(self.marks.ids[end] for end in openings)

    def _reads(self, reply: Message, tools: Sequence[ToolSpec], reader: ReplyReader) -> bool:
        """Returns True if `reader` reads the template's text of `reply` as `reply`, whatever ids its calls get."""
        try:
            prompt = self.text([USER], tools)
            whole = self.text([USER, reply], tools, generation_prompt=False)
        except RenderError:
            return False
        text, goes_on = reply_text(prompt, whole)
        context = ReplyContext(tools, goes_on and opens_reasoning(prompt, reader.format.thinking))
        reading = reader.parse(self.marks.encode(text), context)
        calls = [(getattr(call, "name", ""), getattr(call, "arguments", None)) for call in reading.tool_calls]
        expected_calls = [(call.name, call.arguments) for call in reply.tool_calls if isinstance(call, ToolCall)]
        return (reading.content.strip(), calls) == (reply.content, expected_calls)
