"""A rollout of the verifiers library in which the caller of `reply` is the model."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import queue
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from agentgym.errors import EnvironmentFault, describe_error
from agentgym.tools.calling.background_loop import BackgroundLoop
from agentgym.tools.calling.error_attribution import is_models_mistake

__all__ = ["Asked", "Rollout", "RolloutEnded", "library", "watch"]

MODEL = "agentgym"


@functools.cache
def library() -> Any:
    """The library; raises ImportError if it is not installed."""
    import verifiers.legacy
    from verifiers.legacy.envs import environment

    # An environment of the library sets the process's handlers of SIGINT and SIGTERM when it is made, which only a main
    # thread may do; they are the program's. What its handlers do is also done as the interpreter ends.
    environment.signal = SimpleNamespace(
        SIGINT=signal.SIGINT,
        SIGTERM=signal.SIGTERM,
        default_int_handler=signal.default_int_handler,
        signal=lambda number, handler: None,
    )
    return verifiers.legacy


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The environment wants a reply to these messages, with these tools."""

    messages: list[Any]
    tools: list[Any]
    tool_errors: tuple[str, ...]
    """The answers to calls of tools that raised, so far."""


@dataclass(frozen=True, kw_only=True)
class RolloutEnded:
    """The rollout is over: all of its messages, and the result of its rubric."""

    messages: list[Any]
    tool_errors: tuple[str, ...]
    reward: float
    metrics: dict[str, float]
    timed_out: bool


class Rollout:
    """One rollout of a row of the environment's dataset, from its start to its score."""

    def __init__(self, environment: Any, row: dict[str, Any], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._events: queue.SimpleQueue[Asked | RolloutEnded | BaseException] = queue.SimpleQueue()
        self._waiting: queue.SimpleQueue[asyncio.Future[Any]] = queue.SimpleQueue()
        player = _player_class()(self._events, self._waiting)
        self._ended = _loop.submit(_play_row(environment, row, player, self._events))

    def next_event(self) -> Asked | RolloutEnded:
        """The next event; raises EnvironmentFault if the environment or its rubric failed, or did nothing in time."""
        try:
            event = self._events.get(timeout=self._timeout_s)
        except queue.Empty:
            self.cancel()
            raise EnvironmentFault(f"the environment did nothing for {self._timeout_s:g} s") from None
        if isinstance(event, EnvironmentFault):
            raise event
        if isinstance(event, BaseException):
            raise EnvironmentFault(f"the rollout raised {_format_error(event)}") from event
        return event

    def reply(self, text: str, reasoning: str | None, calls: list[tuple[str, str, str]]) -> None:
        """Passes on the model's reply: its text, and the id, the name and the arguments (as text) of each call."""
        from verifiers.legacy.types import AssistantMessage, ToolCall

        tool_calls = [ToolCall(id=call_id, name=name, arguments=arguments) for call_id, name, arguments in calls]
        message = AssistantMessage(content=text, reasoning_content=reasoning, tool_calls=tool_calls or None)
        future = self._waiting.get_nowait()
        future.get_loop().call_soon_threadsafe(_give, future, message)

    def cancel(self) -> None:
        """Ends it, if it has not ended; the environment's own clean-up runs."""
        self._ended.cancel()


class _Player:
    """A rollout's client: the environment's requests go to one queue, the futures of the replies to another."""

    def __init__(self, events: queue.SimpleQueue[Any], waiting: queue.SimpleQueue[Any]) -> None:
        super().__init__(None)  # type: ignore[call-arg]  # the library's Client
        self._events = events
        self._waiting = waiting

    def setup_client(self, config: object) -> None:
        """Does nothing: there is no server."""

    async def to_native_tool(self, tool: object) -> object:
        """The tool as it is."""
        return tool

    async def to_native_prompt(self, messages: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The messages as they are."""
        return messages, {}

    async def get_native_response(
        self, prompt: list[Any], model: str, sampling_args: object, tools: list[Any] | None = None, **rest: object
    ) -> object:
        """Waits for the reply, and returns it."""
        _raise_tool_fault()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.put(future)
        self._events.put(Asked(messages=list(prompt), tools=tools or [], tool_errors=tuple(_tool_errors.get())))
        return await future

    async def raise_from_native_response(self, response: object) -> None:
        """Does nothing: any reply is valid."""

    async def from_native_response(self, response: Any) -> object:
        """The reply as the library's response."""
        from verifiers.legacy.types import Response, ResponseMessage

        reason = "tool_calls" if response.tool_calls else "stop"
        message = ResponseMessage(**response.model_dump(), finish_reason=reason, is_truncated=False)
        return Response(id=MODEL, created=0, model=MODEL, message=message)

    async def close(self) -> None:
        """Does nothing: there is no connection."""


@functools.cache
def _player_class() -> type[Any]:
    """The client: a class of the library, which is imported when it is needed."""
    from verifiers.legacy.clients.client import Client

    return type("Player", (_Player, Client), {})


def watch(environment: Any) -> None:
    """Notes failures of the environment's reward functions and tools in its rollouts.

    The library itself scores 0 if a reward function raises, and answers every exception of a tool; here one that is
    not the model's mistake ends the rollout as a fault.
    """
    for rubric in _rubrics(environment.rubric):
        rubric.funcs[:] = [_watch_function(func) for func in rubric.funcs]
    if hasattr(environment, "error_formatter"):
        environment.error_formatter = _note_errors(environment.error_formatter)
        environment.call_tool = _record_call(environment.call_tool)
    for inner in getattr(environment, "envs", ()):  # an EnvGroup
        watch(inner)


_loop = BackgroundLoop("agentgym-verifiers")
_faults: contextvars.ContextVar[list[str]] = contextvars.ContextVar("_faults")
_tool_errors: contextvars.ContextVar[list[str]] = contextvars.ContextVar("_tool_errors")
_tool_faults: contextvars.ContextVar[list[tuple[str, Exception]]] = contextvars.ContextVar("_tool_faults")
_call: contextvars.ContextVar[tuple[str, Any]] = contextvars.ContextVar("_call")


async def _play_row(environment: Any, row: dict[str, Any], player: Any, events: queue.SimpleQueue[Any]) -> None:
    from verifiers.legacy.utils.message_utils import normalize_messages

    faults: list[str] = []
    tool_errors: list[str] = []
    _faults.set(faults)
    _tool_errors.set(tool_errors)
    _tool_faults.set([])
    try:
        state = await environment.rollout(row, player, MODEL, {})
        _raise_tool_fault()
        if state.get("error") is not None:
            raise EnvironmentFault(f"the rollout failed: {_format_error(state['error'])}") from state["error"]
        await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        if faults:
            raise EnvironmentFault(f"the rubric failed: {'; '.join(faults)}")
        talk = normalize_messages([*state["prompt"], *(state["completion"] or ())])
        numbers = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        timed_out = bool(state.get("timed_out"))
        reward = float(state["reward"])
    except BaseException as error:  # noqa: BLE001  # the boundary: it is raised in the episode's thread
        events.put(error)
        return
    events.put(
        RolloutEnded(messages=talk, tool_errors=tuple(tool_errors), reward=reward, metrics=numbers, timed_out=timed_out)
    )


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for inner in getattr(rubric, "rubrics", ()):
        yield from _rubrics(inner)


def _watch_function(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `func`, so that its failure is noted before the library scores it 0."""
    name = getattr(func, "__name__", repr(func))

    def number(value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            _faults.get([]).append(f"{name} gave {value!r:.80}, not a number")
            raise

    async def await_number(value: Awaitable[Any]) -> float:
        try:
            result = await value
        except Exception as error:
            _faults.get([]).append(f"{name} raised {_format_error(error)}")
            raise
        return number(result)

    @functools.wraps(func)
    def call_and_note(*args: Any, **keywords: Any) -> Any:
        try:
            result = func(*args, **keywords)
        except Exception as error:
            _faults.get([]).append(f"{name} raised {_format_error(error)}")
            raise
        return await_number(result) if inspect.isawaitable(result) else number(result)

    return call_and_note


def _note_errors(formatter: Callable[[Exception], str]) -> Callable[[Exception], str]:
    def format_and_note(error: Exception) -> str:
        text = formatter(error)
        _tool_errors.get([]).append(text)
        name, arguments = _call.get(("", {}))
        if not is_models_mistake(error, arguments):
            _tool_faults.get([]).append((name, error))
        return text

    return format_and_note


def _record_call(call_tool: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `call_tool`, so that `_note_errors` finds the name and the arguments of its call."""

    @functools.wraps(call_tool)
    async def record_and_call(tool_name: str, tool_args: Any, *rest: Any, **keywords: Any) -> Any:
        _call.set((tool_name, tool_args if isinstance(tool_args, dict) else {}))
        return await call_tool(tool_name, tool_args, *rest, **keywords)

    return record_and_call


def _raise_tool_fault() -> None:
    for name, error in _tool_faults.get([]):
        raise EnvironmentFault(f"tool {name!r} raised {_format_error(error)}", tool=name) from error


def _give(future: asyncio.Future[Any], message: object) -> None:
    if not future.done():
        future.set_result(message)


def _format_error(error: BaseException) -> str:
    cause = error.__cause__
    return describe_error(error) if cause is None else f"{describe_error(error)} ({describe_error(cause)})"
