"""A conversation with a model, token for token as a rollout plays it; its tools are run between the replies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from agentgym.errors import RenderError
from agentgym.evaluation.play.generation import Prompt, Reply, ReplyGenerator, messages_of_prompt
from agentgym.rollout.seeds import derive
from agentgym.tools.calling.definition import Tool, ToolFunction
from agentgym.tools.calling.runner import ToolRunner
from agentgym.types import Message

__all__ = ["Chat"]

_NUMBERS = count()
Runner = Callable[[Coroutine[Any, Any, Reply]], Reply]


class Chat:
    """A conversation: `send` says something and returns the reply; `messages` has all of it.

    A reply that calls tools is answered by them, and the model goes on, until a reply calls none or `max_calls` replies
    did. What was sampled stays as it was, token by token, unless the chat template rewrites history.
    """

    def __init__(self, model: ReplyGenerator, run: Runner, *, max_calls: int = 16) -> None:
        self.messages: list[Message] = []
        self.ids: list[int] = []
        """The ids of the conversation so far, up to the end of the last reply."""
        self.max_calls = max_calls
        self._model, self._run = model, run
        self._tools: ToolRunner | None = None
        self._session = f"chat-{next(_NUMBERS)}"
        self._num_replies = 0

    def start(self, system: str = "", tools: Sequence[Tool | ToolFunction] = ()) -> Chat:
        """Begins the conversation anew, with a system prompt and tools; returns itself."""
        self.messages = [Message("system", system)] if system else []
        self.ids, self._num_replies = [], 0
        if self._tools is not None:
            self._tools.close()
        self._tools = ToolRunner(tools) if tools else None
        self._model = replace(self._model, tools=tuple(self._tools.specs.values()) if self._tools else ())
        return self

    def send(self, said: Prompt) -> Reply:
        """Says something, a text or messages, and returns the reply, after the tools that it called.

        A reply that does not fit into the window has an `error`; what was said is not in the conversation then. Raises
        EnvironmentFault for a tool that fails by no mistake of the model.
        """
        return self._run(self.send_async(said))

    async def send_async(self, said: Prompt) -> Reply:
        """Does what `send` does, on the event loop of the engine."""
        before = list(self.messages), list(self.ids)
        reply = await self._answer(messages_of_prompt(said))
        for _ in range(self.max_calls):
            if reply.error or not reply.message.tool_calls or self._tools is None:
                break
            results = await self._tools.run(reply.message.tool_calls)
            answers = [
                Message("tool", result.content, tool_call_id=result.call_id, name=result.name or None)
                for result in results
            ]
            reply = await self._answer(answers)
        if reply.error:
            self.messages, self.ids = before
        return reply

    async def _answer(self, new: Sequence[Message]) -> Reply:
        """Samples the reply to new messages and adds both to the conversation."""
        self.messages += new
        seed = derive(self._model.config.seed, self._num_replies)
        ids = self._prompt(new)
        reply = await self._model.reply(ids, session=self._session, seed=seed)
        if not reply.error:
            self.ids = [*ids, *reply.ids]
            self.messages.append(reply.message)
            self._num_replies += 1
        return reply

    def _prompt(self, new: Sequence[Message]) -> list[int]:
        """Returns the ids before the next reply: those so far and the new ones, or all where history is rewritten."""
        renderer, tools = self._model.renderer, self._model.tools
        if not self.ids:
            return renderer.render(self.messages, tools)
        try:
            return [*self.ids, *renderer.extend(self.ids, new)]
        except RenderError:
            return renderer.rerender(self.messages, tools)
