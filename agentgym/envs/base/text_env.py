"""The base of every environment: Gymnasium's interface on text, sync and async."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Set
from typing import Any, ClassVar, TypeAlias, TypeVar

import gymnasium
from gymnasium.spaces import Space

from agentgym.envs.base.author_checks import check_attributes
from agentgym.envs.base.card import EnvCard
from agentgym.envs.base.keywords import checks_keywords
from agentgym.envs.base.spaces import Text
from agentgym.envs.base.task_split import TaskDraw, digest_of, prompt_identity
from agentgym.errors import AgentGymError, ConfigError, EnvironmentFault
from agentgym.tools.calling.worker import Worker, run_sync
from agentgym.types import JSON, Message, ToolSpec

__all__ = ["EpisodeOver", "Info", "StepResult", "TextEnv"]

T = TypeVar("T")
Info: TypeAlias = dict[str, Any]
StepResult: TypeAlias = tuple[str, float, bool, bool, Info]
ENV_TURN_LIMIT = "env turn limit"


class EpisodeOver(AgentGymError, gymnasium.error.ResetNeeded):
    """`step` was called before `reset`, or after the episode ended."""


class TextEnv(gymnasium.Env[str, str]):
    """An environment whose observations and actions are text.

    A subclass overrides one of `step` and `async astep`, and one of `reset` and `async areset`; the other one of
    each pair follows. Sync code that is called through the async pair runs on a thread of the environment's own,
    always the same. `self.np_random` is seeded before `reset` runs.

    The base counts turns, truncates at `max_turns`, refuses a step outside an episode, and puts the observation into
    `info["messages"]` as one user message when the subclass put none there. Other keys of the conversation:
    `info["tool_results"]` (tuple of ToolResult) and `info["metrics"]` (dict of floats, with `success` at the end). A
    step's `info["history"]` (tuple of Message, this answer included) is told in place of the whole conversation.

    A reset draws until the task is on the side of its seed, training or held out (`TaskDraw`), so that no task is on
    both. What a task is, is what the model is shown of it, or what `task_identity` returns.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}
    system_prompt: str = ""
    """The system message that opens the conversation; "" is none."""
    max_turns: int | None = None
    """Steps after which the environment truncates (and sets `info["truncated_by"]`); None is no limit."""
    runs_inline: bool = False
    """True promises that `reset` and `step` are short pure computation, so they are called without a thread."""
    tools_optional: bool = False
    """True if an episode may be won without a tool: then there is no warning about a model that calls none."""
    own_split: bool = False
    """True if a reset draws once, whatever the task: the environment keeps training and held-out tasks apart itself,
    by its data, or a seed has to give the same task as elsewhere, and tasks are held out by seed alone."""
    task_digest: str = ""
    """The digest of this episode's task; equal tasks have equal digests, whatever their seeds."""
    split_failed: bool = False
    """True if no draw of this episode's reset was on the side of its seed: there are too few tasks, or their prompts
    do not distinguish them."""
    num_tasks: int | None = None
    """The number of its tasks; None if a seed may draw any number of them."""
    card: EnvCard | None = None
    """The claims of the environment about itself, which `agentgym env check` verifies."""
    close_timeout_s: float = 5.0
    """The seconds that `aclose` waits for the environment's own thread before it abandons it."""

    _abstract: ClassVar[bool] = True
    _hooks: ClassVar[tuple[str, str]] = ("reset", "step")
    """The author's methods that return a first observation and a later one."""
    _made_by_init: ClassVar[Set[str]] = frozenset({"observation_space"})
    """The attributes that tell that the constructor was called."""
    _turns: int = 0
    _open: bool = False
    _inside: bool = False
    _wants_held_out: bool = False
    _last_observation: str = ""
    _last_messages: tuple[Message, ...] = ()
    _worker: Worker | None = None

    @checks_keywords
    def __init__(self, render_mode: str | None = None) -> None:
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"render_mode {render_mode!r} is not supported; use 'ansi' or None")
        self.render_mode = render_mode
        self.observation_space: Space[str] = Text()
        self.action_space: Space[str] = Text()

    def __init_subclass__(cls, *, abstract: bool = False, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls._abstract = abstract
        if "__init__" in cls.__dict__:
            cls.__init__ = checks_keywords(cls.__dict__["__init__"])  # type: ignore[method-assign]
        for sync_name, async_name, derive in (("step", "astep", _derive_step), ("reset", "areset", _derive_reset)):
            own = [name for name in (sync_name, async_name) if name in cls.__dict__]
            if len(own) == 2 and not abstract:
                raise ConfigError(f"{cls.__name__} overrides both {sync_name} and {async_name}; override one of them")
            for name in own:
                _check_kind(cls, name, is_async=name == async_name)
                setattr(cls, name, _with_bookkeeping(name, cls.__dict__[name]))
            if len(own) == 1:
                derive(cls, own[0])
            if not abstract and not own and getattr(cls, sync_name) is getattr(TextEnv, sync_name):
                raise ConfigError(f"{cls.__name__} overrides neither {sync_name} nor {async_name}; override one")

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """The tools that the model is shown; () if it only writes text."""
        return ()

    @property
    def turns(self) -> int:
        """Steps taken in this episode."""
        return self._turns

    def task_identity(self) -> JSON:
        """The identity of this episode's task, as JSON: a hidden word, the numbers of a puzzle.

        None (the default) means all that the model is shown: system prompt, messages and tools. An environment whose
        secrets are not in its prompt overrides this. It is called after `reset`.
        """
        return None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Begins an episode; returns its first observation and info."""
        gymnasium.Env.reset(self, seed=seed, options=options)
        return "", {}

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """`reset` for async callers."""
        gymnasium.Env.reset(self, seed=seed, options=options)
        return "", {}

    def step(self, action: str) -> StepResult:
        """Plays one reply: observation, reward, terminated, truncated, info."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    async def astep(self, action: str) -> StepResult:
        """`step` for async callers."""
        raise NotImplementedError(f"{type(self).__name__} has no astep")

    def render(self) -> str | None:
        """The last observation if the render mode is "ansi", else None."""
        return self._last_observation if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Ends the environment's own thread; a second call does nothing. A subclass that overrides it calls this."""
        self._open = False
        if self._worker is not None:
            self._worker.stop()

    async def aclose(self) -> None:
        """`close` on the thread of the environment's sync code; gives up waiting after `close_timeout_s`."""
        if self.runs_inline or (self._worker is None and type(self).close is TextEnv.close):
            self.close()
            return
        await self.own_thread.run_within(self.close, self.close_timeout_s)

    @property
    def own_thread(self) -> Worker:
        """The thread for this environment's sync code."""
        if self._worker is None:
            self._worker = Worker(f"agentgym-{type(self).__name__}")
        return self._worker

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result for a sync method, whichever thread that runs on."""
        return run_sync(coroutine) if self._worker is None else self._worker.run_sync(coroutine)

    def _begin_turn(self, action: object) -> None:
        if not self._open:
            when = "after the episode ended" if self._turns else "before reset"
            raise EpisodeOver(f"{type(self).__name__}.step was called {when}; call reset first")
        if not isinstance(action, str):
            ways = {Message: "Action.from_message(message) makes one of a Message", dict: "json.dumps makes it a text"}
            way = f"; {ways[type(action)]}" if type(action) in ways else ""
            raise ConfigError(f"an action is a str or an Action, got {type(action).__name__}{way}")
        self._turns += 1

    def _end_turn(self, result: StepResult) -> StepResult:
        self._check_result(result, self._hooks[1], 5)
        observation, reward, terminated, truncated, info = result
        if not hasattr(reward, "__float__"):
            raise EnvironmentFault(f"{type(self).__name__} gave the reward {reward!r:.80}, which is not a number")
        if self.max_turns is not None and self._turns >= self.max_turns and not (terminated or truncated):
            truncated = True
            info["truncated_by"] = ENV_TURN_LIMIT
        self._record_observation(observation, info)
        if terminated or truncated:
            self._open = False
        return observation, float(reward), bool(terminated), bool(truncated), info

    def _check_made(self) -> None:
        """Raises ConfigError if the constructor was not called."""
        if not self.__dict__.keys() >= self._made_by_init:
            raise ConfigError(f"{type(self).__name__}.__init__ must call super().__init__(render_mode)")

    def _begin_episode(self, seed: int | None) -> None:
        self._check_made()
        gymnasium.Env.reset(self, seed=seed)
        self._turns = 0
        self._open = False

    def _begin_draws(self, keywords: dict[str, Any]) -> TaskDraw:
        draw = TaskDraw(keywords.get("seed"), self._wants_held_out)
        self._wants_held_out = draw.wants_held_out
        return draw

    def _is_drawn(self, draw: TaskDraw, result: tuple[str, Info], keywords: dict[str, Any]) -> bool:
        """True if a reset is over; if not, `keywords` are those of the next draw.

        With options, which name the task, and with `own_split`, there is one draw.
        """
        identity, options = self.task_identity(), keywords.get("options") or {}
        if identity is None:
            identity = prompt_identity(self.system_prompt, result[1]["messages"], self.tool_specs)
        self.task_digest = digest_of(identity, options)
        is_drawn = self.own_split or bool(options) or draw.settles(self.task_digest)
        if draw.seed is not None:
            keywords["seed"] = draw.seed
        self.split_failed = draw.has_failed
        return is_drawn

    def _end_reset(self, result: tuple[str, Info]) -> tuple[str, Info]:
        self._check_result(result, self._hooks[0], 2)
        check_attributes(self)
        observation, info = result
        self._record_observation(observation, info)
        self._open = True
        return observation, info

    def _check_result(self, result: object, hook: str, size: int) -> None:
        """Raises EnvironmentFault if `reset` or `step` returned no tuple of its size, or no text in it."""
        name = f"{type(self).__name__}.{hook}"
        if not isinstance(result, tuple | list) or len(result) != size:
            raise EnvironmentFault(f"{name} returned {result!r:.80}; it must be a tuple of {size} values")
        if not isinstance(result[0], str):
            kind = type(result[0]).__name__
            form = "a str or a tuple of Message" if hook == "start" else "a str"
            raise EnvironmentFault(f"{name} gave an observation of type {kind}; it must return {form}")

    def _record_observation(self, observation: str, info: Info) -> None:
        self._last_observation = observation
        if "messages" not in info:
            info["messages"] = (Message("user", observation),)
        self._last_messages = info["messages"]


def _check_kind(cls: type, name: str, *, is_async: bool) -> None:
    if inspect.iscoroutinefunction(inspect.unwrap(cls.__dict__[name])) != is_async:
        form = "`async def`" if is_async else "a plain `def`"
        raise ConfigError(f"{cls.__name__}.{name} must be {form}")


def _with_bookkeeping(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `method` with the bookkeeping of the base; `super()` calls and derived calls inside it pass through."""
    if name in ("reset", "areset"):
        return _with_draws(name, method)
    if name == "step":

        @functools.wraps(method)
        def around(self: TextEnv, *args: Any, **keywords: Any) -> Any:
            if self._inside:
                return method(self, *args, **keywords)
            finish = _enter(self, name, args, keywords)
            try:
                result = method(self, *args, **keywords)
            finally:
                self._inside = False
            return finish(result)

        return around

    @functools.wraps(method)
    async def around_async(self: TextEnv, *args: Any, **keywords: Any) -> Any:
        if self._inside:
            return await method(self, *args, **keywords)
        finish = _enter(self, name, args, keywords)
        try:
            result = await method(self, *args, **keywords)
        finally:
            self._inside = False
        return finish(result)

    return around_async


def _with_draws(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `reset` or `areset` with the bookkeeping of the base, and repeats it until the task is on its side."""
    if name == "reset":

        @functools.wraps(method)
        def around(self: TextEnv, **keywords: Any) -> Any:
            if self._inside:
                _apply_seed(self, keywords)
                return method(self, **keywords)
            draw = self._begin_draws(keywords)
            while True:
                finish = _enter(self, name, (), keywords)
                try:
                    result = finish(method(self, **keywords))
                finally:
                    self._inside = False
                if self._is_drawn(draw, result, keywords):
                    return result

        return around

    @functools.wraps(method)
    async def around_async(self: TextEnv, **keywords: Any) -> Any:
        if self._inside:
            _apply_seed(self, keywords)
            return await method(self, **keywords)
        draw = self._begin_draws(keywords)
        while True:
            finish = _enter(self, name, (), keywords)
            try:
                result = finish(await method(self, **keywords))
            finally:
                self._inside = False
            if self._is_drawn(draw, result, keywords):
                return result

    return around_async


def _enter(env: TextEnv, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Callable[[Any], Any]:
    if name in ("step", "astep"):
        env._begin_turn(args[0] if args else keywords.get("action"))
        env._inside = True
        return env._end_turn
    env._begin_episode(keywords.get("seed"))
    env._inside = True
    return env._end_reset


def _apply_seed(env: TextEnv, keywords: dict[str, Any]) -> None:
    """Applies the seed that a `reset` passes to the `reset` of its base, as everywhere in Gymnasium."""
    if keywords.get("seed") is not None:
        gymnasium.Env.reset(env, seed=keywords["seed"])


# A derived method is bound to the class of the method it calls. Looked up on the object, that could be a subclass's
# method, which calls its base, which is the derived one: an endless recursion.


def _derive_step(cls: type[TextEnv], overridden: str) -> None:
    own = cls.__dict__[overridden]
    if overridden == "step":

        async def astep(self: TextEnv, action: str) -> StepResult:
            """`step` on the environment's own thread."""
            return await _on_own_thread(self, lambda: own(self, action))

        astep.from_sync = True  # type: ignore[attr-defined]
        cls.astep = astep  # type: ignore[method-assign]
        return

    def step(self: TextEnv, action: str) -> StepResult:
        """Runs `astep` and waits for it."""
        result: StepResult = self._wait_for(own(self, action))
        return result

    cls.step = step  # type: ignore[method-assign]


def _derive_reset(cls: type[TextEnv], overridden: str) -> None:
    own = cls.__dict__[overridden]
    if overridden == "reset":

        async def areset(
            self: TextEnv, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, Info]:
            """`reset` on the environment's own thread."""
            return await _on_own_thread(self, lambda: own(self, seed=seed, options=options))

        cls.areset = areset  # type: ignore[method-assign]
        return

    def reset(self: TextEnv, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Runs `areset` and waits for it."""
        result: tuple[str, Info] = self._wait_for(own(self, seed=seed, options=options))
        return result

    cls.reset = reset  # type: ignore[method-assign]


async def _on_own_thread(env: TextEnv, call: Callable[[], T]) -> T:
    return call() if env.runs_inline else await env.own_thread.run(call)
