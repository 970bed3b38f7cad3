"""An environment that is played by calling tools."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

from agentgym.envs.base.action import Action
from agentgym.envs.base.author_checks import called_at, check_parameters, check_tool_names, running_call
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.tools.calling.commands import describe_misfit, read_calls
from agentgym.tools.calling.definition import MARK, Tool, ToolFunction, as_tool
from agentgym.tools.calling.runner import ToolRunner
from agentgym.tools.calling.source import ToolSource
from agentgym.trajectory import MAX_REWARD, is_reward
from agentgym.types import AnyCall, Message, ToolResult, ToolSpec

__all__ = ["ToolEnv"]

TOO_MANY = "not run: at most {limit} calls are answered in one turn"
UNPAID = "Training learns from the reward alone, so pay for a success: self.end(success=True, reward=1.0)"
"""The advice on a success whose episode earned nothing."""
HOOKS = {"start": ["options"], "on_message": ["text"], "on_last_turn": [], "parse_command": ["text"], "release": []}
"""The methods that a class may write, with the parameters that they are called with."""


class ToolEnv(TextEnv, abstract=True):
    """A TextEnv whose actions are tool calls. A subclass writes `start` and its tools:

        class Lock(ToolEnv):
            max_turns = 20

            def start(self, options):
                self.code = int(self.np_random.integers(10))
                return "Open the lock."

            @tool
            def turn(self, digit: int) -> str:
                \"\"\"Turns the dial to a digit.\"\"\"
                if digit == self.code:
                    self.end(success=True, reward=1.0)
                    return "It opens."
                return "Nothing happens."

    Only methods marked with `@tool`, and tools given to the constructor or `add_tool`, are shown to the model.
    Inside a tool, `self.reward` is this step's reward (0 at its begin) and `self.end` ends the episode.
    Plain methods run one after the other on one thread (directly, where `runs_inline`), async ones concurrently.
    """

    max_calls_per_turn: int = 32
    """The most calls of one reply that are run; further ones are answered with an error."""
    max_result_chars: int = 20_000
    """Longer tool results are cut, with a note."""
    reward: float = 0.0
    """The reward of the step being played; tools set or add to it."""
    metrics: dict[str, float]
    """This episode's numbers; tools may add their own. The base counts turns, tool_calls and failed_calls."""

    _hooks = ("start", "on_message")
    _marked: ClassVar[tuple[tuple[str, Tool], ...]] = ()
    _over: bool = False
    _made_by_init = TextEnv._made_by_init | {"_runner"}
    _success: bool | None = None
    _ended_by: object = None
    _is_released: bool = True
    _history: tuple[Message, ...] | None = None

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        tools: Iterable[Tool | ToolFunction] = (),
        tool_sources: Iterable[Callable[[], ToolSource]] = (),
    ) -> None:
        super().__init__(render_mode)
        self._own_tools = [tool.bound_to(self, getattr(self, name)) for name, tool in self._marked]
        self._own_tools += [as_tool(entry) for entry in tools]
        self._source_factories = tuple(tool_sources)
        self._sources: list[ToolSource] = []
        self.metrics = {}
        self._runner = self._make_runner(())

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        marked: dict[str, Tool] = {}
        for base in reversed(cls.__mro__):
            for name, value in vars(base).items():
                mark = getattr(getattr(value, "__func__", value), MARK, None)  # a staticmethod hides its function
                if isinstance(mark, Tool):
                    marked[name] = mark
                elif name in marked and value is None:  # `name = None` takes an inherited tool away
                    del marked[name]
        cls._marked = tuple(marked.items())
        check_tool_names(cls, ToolEnv, cls._marked)
        if "reset" in vars(cls) and cls.start is ToolEnv.start:
            raise ConfigError(f"{cls.__name__} writes reset: a ToolEnv writes start(self, options), which reset calls")
        check_parameters(cls, HOOKS)

    # What a subclass writes

    def start(self, options: dict[str, Any]) -> str | tuple[Message, ...]:
        """Sets the episode up from `self.np_random` and `options`; returns the first observation. May be async.

        Messages open the conversation as they are; a system prompt among them replaces the environment's.
        """
        raise NotImplementedError(f"{type(self).__name__} has no start(self, options) -> str")

    def on_message(self, text: str) -> str:
        """The answer to a reply without a tool call."""
        misfit = None if _is_parsed(text) else describe_misfit(text, self._runner.specs)
        return f"Nothing was done: {misfit or 'a reply must call a tool'}. Tools: {', '.join(self._runner.tools)}"

    def on_last_turn(self) -> None:
        """Called at the end of the last turn that `max_turns` allows, unless the episode is over; may call `end`."""

    def parse_command(self, text: str) -> tuple[AnyCall, ...]:
        """The calls in a text that a person typed; () when it is only text."""
        return read_calls(text, self._runner.specs)

    def release(self) -> None:
        """Releases what `start` acquired; called once for each `start`, whatever happened. May be async."""

    # What a subclass calls

    def end(self, *, success: bool, reward: float | None = None) -> None:
        """Ends the episode with this step; `reward`, when given, is added to the step's reward.

        The first verdict stands: a call beside the one that ended the episode changes nothing. Raises EnvironmentFault,
        and changes nothing, if `success` is not a bool, `reward` is no number up to 1e100, or the same call has ended
        the episode before.
        """
        name, verdict, caller = f"{type(self).__name__}.end", cast(object, success), running_call()
        if isinstance(verdict, str) or verdict not in (True, False):
            raise EnvironmentFault(f"{name} takes success=True or False, got {success!r:.80}{called_at()}")
        if reward is not None and not is_reward(reward):
            what = f"a finite number, at most {MAX_REWARD:g}, as reward; got {reward!r:.80}{called_at()}"
            raise EnvironmentFault(f"{name} takes {what}")
        if self._over:
            if caller == self._ended_by:
                first = f"the first call said success={self._success}"
                raise EnvironmentFault(f"{name} was called twice, and {first}: return after it{called_at()}")
            return
        self._over, self._success, self._ended_by = True, success, caller
        if reward is not None:
            self.reward += float(reward)

    def retell(self, messages: Sequence[Message]) -> None:
        """Has the model go on from `messages`, this step's answer included, in place of the conversation so far."""
        self._history = tuple(messages)

    def add_tool(self, entry: Tool | ToolFunction) -> None:
        """Adds a tool to this environment's tool set."""
        tool = as_tool(entry)
        self._runner.add(tool)
        self._own_tools.append(tool)

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tool set, as names to tools."""
        return self._runner.tools

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """The tools that the model is shown, in the order of their definition."""
        return tuple(self._runner.specs.values())

    # The episode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Begins an episode with fresh tool state."""
        if not self._is_inline:
            return self._wait_for(ToolEnv.areset(self, seed=seed, options=options))
        if not self._is_released:
            self._release_all()
        self._prepare_episode()
        return self._opening_result(self.start(dict(options or {})))

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """`reset` for async callers."""
        if self._is_inline:
            return ToolEnv.reset(self, seed=seed, options=options)
        await self._release_async()
        await self._call_hook(self._prepare_episode)
        return self._opening_result(await self._call_hook(self.start, dict(options or {})))

    def step(self, action: str) -> StepResult:
        """Runs the calls of a reply, and answers each."""
        calls = self._calls_of(action)
        if not (self._is_inline and self._runner.runs_directly(calls)):
            return self._wait_for(ToolEnv.astep(self, action))
        self.reward = 0.0
        if not calls:
            answer, results = self.on_message(action), None
        else:
            answer, results = "", self._runner.run_directly(calls[: self.max_calls_per_turn])
        if self._is_last_turn:
            self.on_last_turn()
        return self._text_result(answer) if results is None else self._calls_result(calls, results)

    async def astep(self, action: str) -> StepResult:
        """`step` for async callers."""
        calls = self._calls_of(action)
        if self._is_inline and self._runner.runs_directly(calls):
            return ToolEnv.step(self, action)
        self.reward = 0.0
        if not calls:
            answer, results = await self._call_hook(self.on_message, action), None
        else:
            answer, results = "", await self._runner.run(calls[: self.max_calls_per_turn])
        if self._is_last_turn:
            await self._call_hook(self.on_last_turn)
        return self._text_result(answer) if results is None else self._calls_result(calls, results)

    def close(self) -> None:
        """Releases the episode's state and the thread; a second call does nothing."""
        if not self._is_released:
            if self._is_inline:
                self._release_all()
            else:
                self._wait_for(self._release_async())
        super().close()

    async def aclose(self) -> None:
        """`close` for async callers, on the thread of the environment's sync code."""
        await self._release_async()
        if type(self).close is ToolEnv.close:
            super().close()
        else:
            await super().aclose()

    # Inside

    @functools.cached_property
    def _is_inline(self) -> bool:
        hooks = (self.start, self.on_message, self.on_last_turn, self.release)
        return self.runs_inline and not any(inspect.iscoroutinefunction(hook) for hook in hooks)

    @property
    def _is_last_turn(self) -> bool:
        """True in the last turn of an episode that goes on, for a class that does something in it."""
        limit_reached = self.max_turns is not None and self._turns >= self.max_turns
        return limit_reached and not self._over and type(self).on_last_turn is not ToolEnv.on_last_turn

    async def _call_hook(self, hook: Callable[..., Any], *args: object) -> Any:
        """`hook(*args)`: awaited when it is async, on the environment's own thread when it is not."""
        if inspect.iscoroutinefunction(hook):
            return await hook(*args)
        return hook(*args) if self._is_inline else await self.own_thread.run(functools.partial(hook, *args))

    def _prepare_episode(self) -> None:
        self._is_released = False
        self._over, self._success, self._history, self.reward = False, None, None, 0.0
        self.metrics = {"turns": 0.0, "tool_calls": 0.0, "failed_calls": 0.0}
        if self._source_factories:
            tools: list[Tool] = []
            for factory in self._source_factories:
                source = factory()
                self._sources.append(source)
                tools += source.open()
            self._runner = self._make_runner(tools)

    def _make_runner(self, extra: Sequence[Tool]) -> ToolRunner:
        return ToolRunner(
            [*self._own_tools, *extra],
            inline=self.runs_inline,
            worker=self.own_thread,
            stopped=lambda: self._over,
            max_result_chars=self.max_result_chars,
        )

    def _release_all(self) -> None:
        """Calls `release`, then every source's `close`, even if one before failed; the first error is raised."""
        self._is_released = True
        with contextlib.ExitStack() as stack:
            while self._sources:
                stack.callback(self._sources.pop(0).close)
            if not inspect.iscoroutinefunction(self.release):
                self.release()

    async def _release_async(self) -> None:
        if self._is_released:
            return
        try:
            if inspect.iscoroutinefunction(self.release):
                await asyncio.wait_for(self.release(), self.close_timeout_s)
        finally:
            if self._is_inline:
                self._release_all()
            else:
                await self.own_thread.run_within(self._release_all, self.close_timeout_s)

    def _calls_of(self, action: str) -> tuple[AnyCall, ...]:
        """The calls of a reply; text is read as a command only if there is no parsed message of a model."""
        return cast(Action, action).tool_calls if _is_parsed(action) else self.parse_command(action)

    def _opening_result(self, opening: object) -> tuple[str, Info]:
        info: Info = {"tool_results": (), "metrics": dict(self.metrics)}
        if isinstance(opening, tuple) and all(isinstance(message, Message) for message in opening):
            return "\n".join(message.content for message in opening), {**info, "messages": opening}
        if isinstance(opening, tuple) and isinstance(opening[0], str):
            raise EnvironmentFault(f"{type(self).__name__}.start returned a tuple: it returns the observation alone")
        return cast("str", opening), info  # any other type is refused like every observation that is no text

    def _end_reset(self, result: tuple[str, Info]) -> tuple[str, Info]:
        if self._is_released:
            advice = "write start(self, options), or call super().reset(seed=seed, options=options)"
            raise ConfigError(f"{type(self).__name__}.reset is not that of ToolEnv: {advice}")
        return super()._end_reset(result)

    def _end_turn(self, result: StepResult) -> StepResult:
        """Refuses an end without a verdict from a `step` of the author's that does not call the one here."""
        checked = super()._end_turn(result)
        _, _, terminated, truncated, info = checked
        is_ours = self.metrics.get("turns") == self._turns
        if (terminated or truncated) and not is_ours and "success" not in info.get("metrics", {}):
            advice = "let super().step(action) run the tools, and end episodes with self.end"
            raise EnvironmentFault(f"{type(self).__name__}.step ended an episode without a verdict: {advice}")
        return checked

    def _text_result(self, text: str) -> StepResult:
        return self._result(text, (), (Message("user", text),))

    def _calls_result(self, calls: Sequence[AnyCall], results: tuple[ToolResult, ...]) -> StepResult:
        if len(results) < len(calls):
            text = TOO_MANY.format(limit=self.max_calls_per_turn)
            results += tuple(
                ToolResult(call.id, getattr(call, "name", ""), text, "tool_error") for call in calls[len(results) :]
            )
        self.metrics["tool_calls"] += len(results)
        for result in results:
            if result.error is not None:
                self.metrics["failed_calls"] += 1
                self.metrics[result.error] = self.metrics.get(result.error, 0.0) + 1
        messages = tuple([_message(result) for result in results])
        return self._result("\n".join([result.content for result in results]), results, messages)

    def _result(self, text: str, results: tuple[ToolResult, ...], messages: tuple[Message, ...]) -> StepResult:
        self.metrics["turns"] = float(self._turns)
        info: Info = {"messages": messages, "tool_results": results}
        if self._history is not None:
            info["history"], self._history = self._history, None
        limit_reached = self.max_turns is not None and self._turns >= self.max_turns
        info["metrics"] = dict(self.metrics)
        if self._over or limit_reached:
            info["metrics"]["success"] = float(bool(self._success))
        return text, self.reward, self._over, False, info


def _is_parsed(action: str) -> bool:
    return isinstance(action, Action) and (bool(action.tool_calls) or action.message is not None)


def _message(result: ToolResult) -> Message:
    return Message("tool", result.content, tool_call_id=result.call_id, name=result.name or None)
