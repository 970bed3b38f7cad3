"""Runs the tool calls of one turn: every call id is answered, in call order, whatever the model or a tool does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentgym.errors import (
    CODE_ERRORS,
    ConfigError,
    EnvironmentFault,
    SandboxError,
    ToolFailure,
    is_interrupt,
    nearest,
    thread_hint,
)
from agentgym.tools.calling.answers import answers_of
from agentgym.tools.calling.definition import Tool, ToolFunction, as_tool
from agentgym.tools.calling.error_attribution import is_models_mistake, raised_at
from agentgym.tools.calling.limiter import limiter_for
from agentgym.tools.calling.result_text import format_result
from agentgym.tools.calling.worker import Worker
from agentgym.types import AnyCall, MalformedCall, ToolCall, ToolResult, ToolSpec

__all__ = ["ToolRunner"]

log = logging.getLogger(__name__)
CANCEL_GRACE_S = 0.25
"""The seconds that a cancelled async tool may take to stop before it is abandoned."""
EPISODE_OVER = "not run: the episode is over"


class ToolRunner:
    """The tools of one episode and their execution.

    `inline`: plain functions are called directly, without thread or time-out (for short pure computation).
    `worker` is the thread for the plain methods of an environment. `stopped` is called before each call of a method;
    if it returns True, the call is answered but not run. `max_result_chars` is the length at which results are cut.
    """

    def __init__(
        self,
        tools: Iterable[Tool | ToolFunction],
        *,
        inline: bool = False,
        worker: Worker | None = None,
        stopped: Callable[[], bool] | None = None,
        max_result_chars: int = 20_000,
    ) -> None:
        self.tools: dict[str, Tool] = {}
        self.specs: dict[str, ToolSpec] = {}
        for entry in tools:
            self.add(as_tool(entry))
        self.inline = inline
        self.worker = worker or Worker("agentgym-tools")
        self.max_result_chars = max_result_chars
        self._is_stopped = stopped or (lambda: False)

    def add(self, tool: Tool) -> None:
        """Adds a tool; raises ConfigError if its name is taken."""
        if tool.name in self.tools:
            raise ConfigError(f"two tools are called {tool.name!r}; give one of them another name")
        self.tools[tool.name] = tool
        self.specs[tool.name] = tool.spec

    def close(self) -> None:
        """Ends the thread for plain methods; a second call does nothing."""
        self.worker.stop()

    def runs_directly(self, calls: Sequence[AnyCall]) -> bool:
        """Returns whether `run_directly` can answer these calls: nothing to await, no thread needed."""
        for call in calls:
            tool = self.tools.get(call.name) if isinstance(call, ToolCall) else None
            if tool is None:
                continue
            if tool.is_async or tool.rate_limit_per_s is not None or not (self.inline or not tool.blocking):
                return False
        return True

    def run_directly(self, calls: Sequence[AnyCall]) -> tuple[ToolResult, ...]:
        """Returns the answers, computed synchronously, one call after the other.

        It calls a tool itself, not through `_call`, so that few frames lead to the author's code.
        """
        answers: list[ToolResult] = []
        for call in calls:
            tool = self._tool_to_run(call)
            if isinstance(tool, ToolResult):
                answers.append(tool)
                continue
            assert isinstance(call, ToolCall)
            try:
                answers.append(self._result(tool, call, tool.fn(**tool.convert(call.arguments))))
            except CODE_ERRORS as error:  # the boundary: a tool is user code
                answers.append(self._failure(tool, call, error))
        return tuple(answers)

    async def run(self, calls: Sequence[AnyCall]) -> tuple[ToolResult, ...]:
        """Returns the answers in call order. Plain methods run in sequence on the worker, everything else concurrently.

        Raises EnvironmentFault if a tool raised an error that the model cannot have caused (`Tool.on_error`); other
        calls are stopped. A tool's ToolFailure is its answer, word for word.
        """
        if self.runs_directly(calls):
            return self.run_directly(calls)
        methods = asyncio.Lock()
        tasks = [asyncio.ensure_future(self._answer(call, methods)) for call in calls]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            unfinished = [task for task in tasks if not task.done()]
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.gather(*unfinished, return_exceptions=True)

    def _check_call(self, call: AnyCall) -> Tool | ToolResult:
        """Returns the tool to run, or the answer to a call that cannot be run."""
        if isinstance(call, MalformedCall):
            text = f"this tool call could not be read: {call.error}. Nothing was run; send it again in the right form."
            return ToolResult(call.id, "", text, "truncated" if call.truncated else "malformed")
        tool = self.tools.get(call.name)
        if tool is None:
            name = call.name[:80]
            hint = nearest(name, self.tools) or "."
            text = f"unknown tool {name!r}{hint} Tools: {', '.join(self.tools) or 'none'}"
            return ToolResult(call.id, call.name, text, "unknown_tool")
        problem = tool.check(call.arguments)
        if problem is not None:
            return ToolResult(call.id, call.name, f"invalid arguments for {tool.name}: {problem}", "invalid_arguments")
        return tool

    def _tool_to_run(self, call: AnyCall) -> Tool | ToolResult:
        """Returns the tool to run now, or the answer to a call that cannot be run or need not be."""
        tool = self._check_call(call)
        if isinstance(tool, ToolResult):
            return tool
        assert isinstance(call, ToolCall)
        if self._is_stopped():
            return _episode_over(call)
        return self._kept_answer(tool, call) or tool

    def _kept_answer(self, tool: Tool, call: ToolCall) -> ToolResult | None:
        """Returns the answer that a pure tool gave before, or None."""
        if not tool.pure or self._is_stopped():
            return None
        answer = answers_of(tool).get(call.arguments)
        return None if answer is None else ToolResult(call.id, call.name, self._fitting(answer))

    def _call(self, tool: Tool, call: ToolCall) -> ToolResult:
        """Runs a plain function synchronously."""
        if self._is_stopped():
            return _episode_over(call)
        try:
            return self._result(tool, call, tool.fn(**tool.convert(call.arguments)))
        except CODE_ERRORS as error:  # the boundary: a tool is user code
            return self._failure(tool, call, error)

    async def _answer(self, call: AnyCall, methods: asyncio.Lock) -> ToolResult:
        tool = self._check_call(call)
        if isinstance(tool, ToolResult):
            return tool
        assert isinstance(call, ToolCall)
        stored_answer = self._kept_answer(tool, call)
        if stored_answer is not None:
            return stored_answer
        limiter = limiter_for(tool.fn, tool.max_concurrency, tool.rate_limit_per_s)
        if tool.is_async:
            async with limiter:
                return await self._run_async(tool, call)
        if self.inline or not tool.blocking:
            async with limiter:
                return self._call(tool, call)
        if tool.owner is None:
            async with limiter:
                return await self._run_on_thread(tool, call, Worker(f"agentgym-tool-{tool.name}"))
        async with methods, limiter:
            return await self._run_on_thread(tool, call, self.worker)

    async def _run_on_thread(self, tool: Tool, call: ToolCall, worker: Worker) -> ToolResult:
        future = asyncio.wrap_future(worker.submit(lambda: self._call(tool, call)))
        try:
            done, _ = await asyncio.wait({future}, timeout=tool.timeout_s)
        except asyncio.CancelledError:  # another call of the reply has failed
            worker.stop()
            future.add_done_callback(_forget)
            raise
        if done:
            if worker is not self.worker:
                worker.stop()
            return future.result()
        worker.stop()
        future.add_done_callback(_forget)
        log.warning("tool %r went past its time-out and cannot be stopped; its thread is abandoned", tool.name)
        return _timed_out(tool, call)

    async def _run_async(self, tool: Tool, call: ToolCall) -> ToolResult:
        if self._is_stopped() and tool.owner is not None:
            return _episode_over(call)
        task = asyncio.ensure_future(self._await_tool(tool, call))
        try:
            done, _ = await asyncio.wait({task}, timeout=tool.timeout_s)
            if done:
                return task.result() if not task.cancelled() else self._failure(tool, call, asyncio.CancelledError())
        finally:
            if not task.done():
                await self._give_up(task)
        return _timed_out(tool, call)

    async def _await_tool(self, tool: Tool, call: ToolCall) -> ToolResult:
        try:
            result: Any = tool.fn(**tool.convert(call.arguments))
            return self._result(tool, call, await result)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the boundary: a tool is user code
            return self._failure(tool, call, error)

    async def _give_up(self, task: asyncio.Task[ToolResult]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        task.add_done_callback(_forget)

    def _result(self, tool: Tool, call: ToolCall, value: object) -> ToolResult:
        try:
            text = value if type(value) is str else format_result(value)
        except (TypeError, ValueError, RecursionError) as error:
            what = f"a {type(value).__name__}, which is neither text nor JSON: {error}"
            raise EnvironmentFault(f"tool {tool.name!r} returned {what}", tool=tool.name) from error
        if tool.pure:
            answers_of(tool).keep(call.arguments, text)
        return ToolResult(call.id, call.name, self._fitting(text))

    def _failure(self, tool: Tool, call: ToolCall, error: BaseException) -> ToolResult:
        """Returns `error` as an answer for the model; raises EnvironmentFault if the model cannot have caused it.

        Raises Ctrl-C as it is.
        """
        if is_interrupt(error):
            raise error
        if isinstance(error, EnvironmentFault):
            error.tool = error.tool or tool.name
            raise error
        if isinstance(error, ToolFailure):
            return ToolResult(call.id, call.name, self._fitting(str(error)), error.kind)
        answered = tool.on_error == "answer" or (tool.on_error == "auto" and is_models_mistake(error, call.arguments))
        if isinstance(error, SandboxError) or not answered:
            what = f"{type(error).__name__}{raised_at(error, tool.fn)}: {_safe_text(error)}{thread_hint(error)}"
            raise EnvironmentFault(f"tool {tool.name!r} raised {what}", tool=tool.name) from error
        log.info("tool %r raised; the model reads the error", tool.name, exc_info=error)
        text = f"{tool.name} failed: {type(error).__name__}: {_safe_text(error)}"
        return ToolResult(call.id, call.name, _encodable(text), "tool_error")

    def _fitting(self, text: str) -> str:
        if len(text) > self.max_result_chars:
            cut = len(text) - self.max_result_chars
            text = f"{text[: self.max_result_chars]}\n[{cut} more characters were cut]"
        return _encodable(text)


def _encodable(text: str) -> str:
    """Returns `text` without lone surrogates: JSON can encode them, but no tokenizer and no file takes them."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")


def _safe_text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:  # noqa: BLE001  # the boundary: the message of a user's exception is user code too
        return "(no message)"


def _episode_over(call: ToolCall) -> ToolResult:
    return ToolResult(call.id, call.name, EPISODE_OVER, "tool_error")


def _timed_out(tool: Tool, call: ToolCall) -> ToolResult:
    """Returns the answer to a call beyond `timeout_s`; raises EnvironmentFault if that is not the model's fault."""
    text = f"{tool.name} gave no answer within {tool.timeout_s:g} s"
    if tool.on_timeout == "raise":
        raise EnvironmentFault(f"tool {text} (timeout_s)", tool=tool.name)
    return ToolResult(call.id, call.name, text, "timeout")


def _forget(future: asyncio.Future[ToolResult]) -> None:
    """Reads the outcome of an abandoned call, so that asyncio does not report it as lost."""
    if not future.cancelled():
        future.exception()
