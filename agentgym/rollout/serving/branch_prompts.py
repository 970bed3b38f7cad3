"""The prompts of an agent's requests: the ids of the branch that one continues and its new messages, or a render."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from agentgym.chat_templates.protocol import GrammarRenderer, Renderer
from agentgym.errors import RenderError
from agentgym.rollout.episode.long_text import text_size
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.rollout.serving.plain_roles import plain_roles
from agentgym.rollout.serving.reply_tree import (
    Context,
    Node,
    Place,
    ReplyTree,
    SampledReply,
    next_context,
    root_context,
)
from agentgym.rollout.serving.wires.wire import CONTEXT_EXCEEDED, AgentRequest, RequestRefused, UnsupportedValue
from agentgym.types import Message, ToolResult, ToolSpec

__all__ = ["BranchPrompts"]

MAX_UNCHECKED = 1 << 20
"""The most characters of a prompt that is rendered without a look at whether it can fit into the window."""


class BranchPrompts(RolloutLoop):
    """A RolloutLoop that finds the prompt of a request in an episode's tree, and the grammar that holds its reply."""

    _longest_token = 0
    """The most characters of a token; 0 until a long request asks for it."""

    async def _context(self, tree: ReplyTree, request: AgentRequest) -> tuple[Context, Node, list[int]]:
        """Returns the context of a request, and its prompt; raises RequestRefused.

        A request that only counts may fill the window, and leaves the tree as it is.
        """
        request = tree.read(request)
        place = tree.find(request)
        if place.node.context is not None:
            context = place.node.context
        elif (continued := await self._continue(request, place)) is not None:
            context = continued
        else:
            messages, ids = await self._render(request.messages, request.tools)
            context = root_context(request, messages, ids, tree.find_before(request, place))
        prompt_ids = context.prompt()
        if not request.counts_only:
            self.check_room(len(prompt_ids))
            if place.node.context is None:
                place.node.context = context
                tree.add(context)
                if place.anchor is not None:
                    place.anchor.follow(tree.num_asked)
        return context, place.node, prompt_ids

    async def _continue(self, request: AgentRequest, place: Place) -> Context | None:
        """Returns the context that continues a reply; None if the template cannot append what is new."""
        anchor, new = place.anchor, place.new
        if anchor is None or not new or any(message.role == "assistant" for message in new):
            return None
        before = anchor.prompt()
        await self._check_length(new, len(before))
        for messages in (new, plain_roles((anchor.message, *new))[1:]):
            answer, conversation = (
                _agents_answer(anchor, messages),
                (*anchor.context.messages, anchor.message, *messages),
            )
            try:
                prompt = await self._render_next(before, answer, conversation, anchor.context.tools)
            except RenderError:
                continue
            child = next_context(anchor, conversation, prompt, answer)
            child.label, child.client = request.label, request.client
            return child
        return None

    async def _render(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
    ) -> tuple[tuple[Message, ...], list[int]]:
        """Returns the messages in the form that the chat template takes, and their ids; raises RequestRefused."""
        await self._check_length(messages, tools=tools)
        try:
            return messages, await self._render_prompt(messages, tools)
        except RenderError as error:
            plain = plain_roles(messages)
            try:
                return plain, await self._render_prompt(plain, tools)
            except RenderError:
                text = f"these messages cannot be rendered: {error}"
                raise RequestRefused(text, "not_renderable", "messages") from error

    async def _check_length(
        self, messages: Sequence[Message], num_before: int = 0, tools: Sequence[ToolSpec] = ()
    ) -> None:
        """Raises RequestRefused for texts that fill the window after `num_before` tokens even in the longest tokens.

        It costs nothing beside a render of so much text. Reasoning does not count: templates leave it out.
        """
        size = text_size(replace(message, reasoning=None, content=message.content.strip()) for message in messages)
        size += sum(len(tool.description) + len(str(tool.parameters)) for tool in tools)
        if size <= MAX_UNCHECKED:
            return
        if not self._longest_token:
            self._longest_token = await asyncio.to_thread(_longest_token, self.renderer)
        self.check_room(num_before + size // self._longest_token, "at least ")

    def check_room(self, num_tokens: int, bound: str = "") -> None:
        """Raises RequestRefused, in OpenAI's words, if a row so long leaves no token of the window for a reply."""
        if num_tokens >= self.window:
            raise RequestRefused(
                f"This model's maximum context length is {self.window} tokens. However, your messages resulted in "
                f"{bound}{num_tokens} tokens, which leaves none for the reply. Please reduce the length of the "
                "messages.",
                CONTEXT_EXCEEDED,
                "messages",
            )

    def _constraint(self, request: AgentRequest) -> str:
        """Returns the grammar that holds a reply to what the agent requires; raises UnsupportedValue."""
        if request.tool_choice in ("auto", "none") and request.schema is None:
            return ""
        value = request.schema if request.schema is not None else request.tool_choice
        if not getattr(self.engine, "takes_grammar", False):
            raise UnsupportedValue(request.constraint, value, reason="The engine constrains no replies.")
        parts: list[object] = [] if request.schema is None else [{"type": "json_schema", "json_schema": request.schema}]
        required_name = request.tool_choice.removeprefix("=") if request.tool_choice.startswith("=") else ""
        tools = [tool for tool in request.tools if required_name in ("", tool.name)]
        if request.tool_choice != "none" and tools:
            try:
                assert isinstance(self.renderer, GrammarRenderer)
                calls = json.loads(self.renderer.call_grammar(tools))["format"]
            except (AssertionError, RenderError) as error:
                raise UnsupportedValue(
                    request.constraint, value, reason="The model's calls have no grammar."
                ) from error
            calls |= {"at_least_one": True, "stop_after_first": bool(required_name)}
            parts = [calls] if request.tool_choice != "auto" else [*parts, calls]
        if not parts:
            raise UnsupportedValue(request.constraint, value, reason="There are no tools.")
        body = parts[0] if len(parts) == 1 else {"type": "or", "elements": parts}
        return json.dumps({"type": "structural_tag", "format": body}, ensure_ascii=False, default=dict)


def _longest_token(renderer: Renderer) -> int:
    """Returns the most characters of a token, and one for a space that a token alone is shown without."""
    return 1 + max(len(renderer.decode([token])) for token in range(renderer.vocab_size))


def _agents_answer(reply: SampledReply, new: Sequence[Message]) -> EnvStep:
    """Returns the agent's own answer to a reply, with a result for each call if it has them in their order."""
    results = [message for message in new if message.role == "tool"]
    texts = [message for message in new if message.role != "tool"]
    calls = reply.message.tool_calls
    answers: tuple[ToolResult, ...] = ()
    if results and [result.tool_call_id for result in results] == [call.id for call in calls]:
        pairs = zip(results, calls, strict=True)
        answers = tuple(ToolResult(call.id, getattr(call, "name", ""), result.content) for result, call in pairs)
    return EnvStep("\n".join(message.content for message in texts or results), tuple(new), tool_results=answers)
