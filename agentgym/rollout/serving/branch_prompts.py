"""The prompts of an agent's requests: the ids of the branch that one continues and its new messages, or a render."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentgym.chat_templates.protocol import GrammarRenderer
from agentgym.errors import RenderError
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.rollout.serving.plain_roles import plain_roles
from agentgym.rollout.serving.reply_tree import Context, Node, Place, ReplyTree, SampledReply
from agentgym.rollout.serving.wires.wire import CONTEXT_EXCEEDED, AgentRequest, RequestRefused, UnsupportedValue
from agentgym.types import Message, ToolResult, ToolSpec

__all__ = ["BranchPrompts"]


class BranchPrompts(RolloutLoop):
    """A RolloutLoop that finds the prompt of a request in an episode's tree, and the grammar that holds its reply."""

    async def _context(self, tree: ReplyTree, request: AgentRequest) -> tuple[Context, Node]:
        """Returns the context of a request, with its prompt rendered; raises RequestRefused."""
        place = tree.find(request)
        if place.node.context is not None:
            return place.node.context, place.node
        if request.messages[-1].role == "assistant":
            raise RequestRefused("the last message is the assistant's: no agent starts a reply", "no_prefill")
        context = await self._continue(tree, request, place)
        if context is None:
            messages, ids = await self._render(request.messages, request.tools)
            self._check_room(len(ids))
            context = tree.add_root(request, messages, ids)
            if place.anchor is not None:
                place.anchor.is_followed = True
        place.node.context = context
        return context, place.node

    async def _continue(self, tree: ReplyTree, request: AgentRequest, place: Place) -> Context | None:
        """Returns the context that continues a reply; None if the template cannot append what is new."""
        anchor, new = place.anchor, place.new
        if anchor is None or any(message.role == "assistant" for message in new):
            return None
        before = anchor.prompt()
        for messages in (new, plain_roles((anchor.message, *new))[1:]):
            answer, conversation = (
                _agents_answer(anchor, messages),
                (*anchor.context.messages, anchor.message, *messages),
            )
            try:
                prompt = await self._render_next(before, answer, conversation, anchor.context.tools)
            except RenderError:
                continue
            self._check_room(len(prompt.ids) + (0 if prompt.begins_row else len(before)))
            child = tree.add_child(anchor, conversation, prompt.ids, answer, begins_row=prompt.begins_row)
            child.label, child.client = request.label, request.client
            return child
        return None

    async def _render(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
    ) -> tuple[tuple[Message, ...], list[int]]:
        """Returns the messages in the form that the chat template takes, and their ids; raises RequestRefused."""
        try:
            return messages, await self._render_prompt(messages, tools)
        except RenderError as error:
            plain = plain_roles(messages)
            try:
                return plain, await self._render_prompt(plain, tools)
            except RenderError:
                text = f"these messages cannot be rendered: {error}"
                raise RequestRefused(text, "not_renderable", "messages") from error

    def _check_room(self, num_tokens: int) -> None:
        """Raises RequestRefused, in OpenAI's words, if a row so long leaves no token of the window for a reply."""
        if num_tokens >= self.window:
            raise RequestRefused(
                f"This model's maximum context length is {self.window} tokens. However, your messages resulted in "
                f"{num_tokens} tokens, which leaves none for the reply. Please reduce the length of the messages.",
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
