"""ChatML as Hermes, Qwen2.5 and Qwen3 write it: exact extension of a conversation at the cost of the new text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentgym.chat_templates.formats.hermes import HERMES
from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.errors import RenderError
from agentgym.types import JSON, Message

__all__ = ["BielikRenderer", "ChatMLRenderer"]

_ROLES = ("user", "system", "tool")
_FIRST, _SECOND = "Qv7first", "Qv7second"
_NO_REPLY, _PROMPT = "reply", "prompt"


@dataclass(frozen=True, slots=True)
class _Glue:
    """The glue between two contents: text up to the first mark, ids from there to the last mark, text after it.

    `ids` is None if there is no mark, so that `head` alone joins the contents.
    """

    head: str
    ids: tuple[int, ...] | None = None
    tail: str = ""


class ChatMLRenderer(TemplateRenderer):
    """A `TemplateRenderer` for ChatML, whose `extend` needs no Jinja and encodes little more than the new contents.

    At construction it measures the template's ids between a reply, user, system and tool messages and the next reply,
    and compares the result of `extend` with the template's own ids for messages alone and together: a template that is
    no append-only ChatML, or changes contents, raises RenderError.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        reply_format: ReplyFormat = HERMES,
        variables: Mapping[str, JSON] | None = None,
    ) -> None:
        super().__init__(tokenizer, reply_format=reply_format, variables=variables)
        if self._end != "<|im_end|>":
            raise RenderError(f"{tokenizer.name!r} ends a reply with {self._end!r}; ChatML ends it with '<|im_end|>'")
        if "user" in self.refusals:
            raise RenderError(f"{tokenizer.name!r} is not append-only: {self.refusals['user']}")
        if self.result_needs:
            needs = " and ".join(sorted(self.result_needs))
            raise RenderError(f"{tokenizer.name!r} writes {needs} around a result; ChatML writes its content alone")
        roles = [role for role in _ROLES if role not in self.refusals]
        self._glue = {
            (before, after): self._measure(before, after)
            for before in (_NO_REPLY, *roles)
            for after in (*roles, _PROMPT)
        }
        self._verify()

    def extend(self, ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """Returns the ids to append to `ids`; see `TemplateRenderer.extend`."""
        appended: list[int] = []
        pending, before = "", _NO_REPLY
        for message in new_messages:
            glue = self._glue.get((before, message.role))
            if glue is None or not self.marks.is_plain(message.content):
                return super().extend(ids, new_messages)
            pending = self._join(appended, pending, glue) + message.content
            before = message.role
        self._join(appended, pending, self._glue[before, _PROMPT])
        return appended[1:] if ids and ids[-1] in self._stop_ids else appended

    def _join(self, appended: list[int], pending: str, glue: _Glue) -> str:
        """Appends what `glue` completes; returns the text that waits for what follows."""
        text = pending + glue.head
        if glue.ids is None:
            return text
        if text:
            appended.extend(self.marks.encode(text))
        appended.extend(glue.ids)
        return glue.tail

    def _measure(self, before: str, after: str) -> _Glue:
        first = [] if before == _NO_REPLY else [_message(before, _FIRST, "call_0")]
        second = [] if after == _PROMPT else [_message(after, _SECOND, f"call_{len(first)}")]
        text = self.after_reply([*first, *second])
        start = 0 if before == _NO_REPLY else text.index(_FIRST) + len(_FIRST)
        between = text[start : None if after == _PROMPT else text.index(_SECOND)]
        parts = self.marks.split(between)
        marks = [at for at, (_, index) in enumerate(parts) if index is not None]
        if not marks:
            return _Glue(between)
        head = "".join(text for text, _ in parts[: marks[0]])
        stop = len(parts) if after == _PROMPT else marks[-1] + 1
        inner = "".join(text for text, _ in parts[marks[0] : stop])
        return _Glue(head, tuple(self.marks.encode(inner)), "".join(text for text, _ in parts[stop:]))

    def _verify(self) -> None:
        """Raises RenderError unless `extend` equals the template's own text, encoded at once."""
        contents = ("North: a door.", "", " \n\tpadded\n\n", '"quoted" {"a": [1]}', "é 日本 🙂")
        roles = [role for role in _ROLES if role not in self.refusals]
        cases = [[_message(role, text, "call_0")] for role in roles for text in contents]
        if "tool" in roles:
            cases.append([_message("tool", text, f"call_{n}") for n, text in enumerate(contents)])
        cases += [[*cases[-1], _message("user", "Go on.", ""), _message("user", "Now.", "")], []]
        for case in cases:
            if self.extend((), case) != super().extend((), case):
                turns = ", ".join(message.role for message in case) or "none"
                raise RenderError(f"the template of {self.tokenizer.name!r} changes contents (new messages: {turns})")


class BielikRenderer(ChatMLRenderer):
    """A `ChatMLRenderer` for a template that frames results wrongly if a system prompt comes first.

    It looks one message too early for a result's neighbours (`messages[loop.index0 + 1]`, in a loop over
    `messages[1:]`), and so omits where the turn of results begins or ends. `extend` frames the results as the template
    does without a system prompt: one turn around all of them.
    """

    keeps_what_was_shown = True


def _message(role: str, content: str, call_id: str) -> Message:
    if role == "tool":
        return Message("tool", content, tool_call_id=call_id)
    return Message("system" if role == "system" else "user", content)
