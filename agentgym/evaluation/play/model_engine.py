"""A model that is ready to play, for plain Python and notebooks: `create_engine`, `run_episode`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from agentgym.chat_templates import open_renderer
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.template_folder import chat_folder
from agentgym.embedded import EMBEDDED
from agentgym.engines.protocol import Engine
from agentgym.engines.server_kind import check_engine_name
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.envs.base.policies import POLICIES
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.catalog.resolve import turn_limit
from agentgym.errors import ConfigError, EngineError, nearest
from agentgym.evaluation.play.chat import Chat
from agentgym.evaluation.play.config import EvalConfig
from agentgym.evaluation.play.evaluate import policy_loop
from agentgym.evaluation.play.generation import GenerationConfig, Prompt, Reply, ReplyGenerator
from agentgym.evaluation.play.open_model import LocalModel, ServedModel, open_model
from agentgym.evaluation.play.policies import played_env
from agentgym.loading import code_path_of
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.episode_loop import EpisodeLoop
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.hosting.event_loop import run_async
from agentgym.rollout.limits import Limits, SamplingConfig
from agentgym.rollout.sampling.sampler import Sampler
from agentgym.tools.calling.background_loop import BackgroundLoop
from agentgym.tools.calling.definition import Tool, ToolFunction, as_tool
from agentgym.trajectory import Trajectory
from agentgym.types import JSON, Message, Task, ToolSpec

__all__ = ["ModelEngine", "create_engine", "run_episode"]

T = TypeVar("T")


class ModelEngine:
    """An engine with the chat format of its model; `create_engine` returns one.

    Its event loop runs on a thread of its own, so it works in a notebook too. Close it, or use it in a `with` block.
    """

    def __init__(self, open_it: Coroutine[object, object, Engine], renderer: Renderer) -> None:
        self.renderer = renderer
        self._background = BackgroundLoop("agentgym-engine")
        self._closed = False
        try:
            self.engine = self.run(open_it)
        except BaseException:
            self._background.close()
            raise

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Returns the coroutine's result, computed on the engine's event loop."""
        if self._closed:
            work.close()
            raise EngineError("this engine is closed; create_engine makes another one")
        return self._background.submit(work).result()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        config: GenerationConfig | None = None,
        *,
        on_reply: Callable[[Reply], None] | None = None,
        **settings: Any,  # those of GenerationConfig, which checks them
    ) -> list[Reply]:
        """Returns the replies to texts or conversations, in their order: `engine.generate(["Hello"], max_tokens=64)`.

        A prompt is a text, or messages (ours, or OpenAI's objects); one alone is a list of one. `on_reply` sees each
        reply in that order. A prompt that cannot be answered gives a reply with an `error`, and the others go on.
        """
        return self.run(self._generate(prompts, self._generator(config, settings), on_reply))

    async def generate_async(
        self,
        prompts: Prompt | Iterable[Prompt],
        config: GenerationConfig | None = None,
        *,
        on_reply: Callable[[Reply], None] | None = None,
        **settings: Any,
    ) -> list[Reply]:
        """Does what `generate` does, for a program with an event loop of its own."""
        return await self.submit(self._generate(prompts, self._generator(config, settings), on_reply))

    def chat(
        self,
        system: str = "",
        *,
        tools: Sequence[Tool | ToolFunction] = (),
        max_calls: int = 16,
        **settings: Any,
    ) -> Chat:
        """Begins a conversation: `chat = engine.chat("Be brief.", tools=[search]); chat.send("Who are you?").text`.

        `settings` are those of `GenerationConfig`.
        """
        return Chat(self._generator(None, settings), self.run, max_calls=max_calls).start(system, tools)

    def _generator(self, config: GenerationConfig | None, settings: Mapping[str, Any]) -> ReplyGenerator:
        """Returns what samples replies with these settings; tools may be functions, whose schemas are shown."""
        names = {"tools", *(setting.name for setting in fields(GenerationConfig))}
        if unknown := [name for name in settings if name not in names]:
            raise ConfigError(f"replies have no setting {unknown[0]!r}{nearest(unknown[0], names) or '.'}")
        tools = settings.get("tools", ())
        specs = tuple(tool if isinstance(tool, ToolSpec) else as_tool(tool).spec for tool in tools)
        changes = {name: value for name, value in settings.items() if name != "tools"}
        if isinstance(stop := changes.get("stop"), str):
            changes["stop"] = (stop,)
        return ReplyGenerator(self.engine, self.renderer, replace(config or GenerationConfig(), **changes), specs)

    async def _generate(
        self, prompts: Prompt | Iterable[Prompt], model: ReplyGenerator, on_reply: Callable[[Reply], None] | None
    ) -> list[Reply]:
        alone = isinstance(prompts, str | Message | Mapping)
        prompt_list = cast("Iterable[Prompt]", [prompts] if alone else prompts)
        replies = []
        async for reply in model.replies(prompt_list):
            replies.append(reply)
            if on_reply is not None:
                on_reply(reply)
        return replies

    def submit(self, work: Coroutine[object, object, T]) -> asyncio.Future[T]:
        """Runs the coroutine on the engine's event loop, and returns its result to that of the caller."""
        if self._closed:
            work.close()
            raise EngineError("this engine is closed; create_engine makes another one")
        return asyncio.wrap_future(self._background.submit(work))

    def close(self) -> None:
        """Ends the engine and what it launched; a second call does nothing."""
        if not self._closed:
            try:
                self.run(self.engine.close())
            finally:
                self._closed = True
                self._background.close()

    def __enter__(self) -> ModelEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def create_engine(
    model: str | Path = EMBEDDED,
    kind: str = "local",
    *,
    family: str | None = None,
    chat_template: str = "",
    chat_template_kwargs: Mapping[str, JSON] | None = None,
    servers: ServerConfig | None = None,
    **settings: Any,  # those of LocalModel, which checks them
) -> ModelEngine:
    """Loads a model that is ready to play: one that ships, a model's folder, a GGUF file, or an id of the hub.

    `local` runs it in this process; its settings are `device` (`cpu`, `cuda`), `dtype` (`auto`, `float32`, `bfloat16`),
    `window` (tokens of prompt and reply together), `num_slots` (requests at once) and `backend` (the code that computes
    it, or the place of a class of one's own). `sglang`, `vllm` and other names of `agentgym.engines.SERVERS` launch
    servers of it, or use those of `servers`. `family` is its chat format, by a name of `agentgym tools families` or
    the place of a function of one's own, if its template is not recognized; `chat_template` is a file or a name
    (`chatml`) of one that replaces the template, and `chat_template_kwargs` are its variables, such as
    `{"enable_thinking": False}` for Qwen3.

    Raises RunFolderError for a folder without a model, UnknownName for another kind, ConfigError for settings that
    cannot work, EngineError for a server that does not start.
    """
    how = _how(kind, servers, settings)
    folder = chat_folder(str(model), chat_template)
    renderer = open_renderer(folder, family, variables=chat_template_kwargs)
    return ModelEngine(open_model(folder, how), renderer)


def _how(kind: str, servers: ServerConfig | None, settings: Mapping[str, Any]) -> LocalModel | ServedModel:
    """Returns the settings of an engine of this kind; raises ConfigError for those of another."""
    check_engine_name(kind)
    names = {setting.name for setting in fields(LocalModel)}
    if unknown := [name for name in settings if name not in names]:
        raise ConfigError(f"create_engine has no setting {unknown[0]!r}{nearest(unknown[0], names) or '.'}")
    if kind == "local":
        if servers is not None:
            raise ConfigError("servers are of another kind, such as sglang; local runs in this process")
        return LocalModel(**settings)
    if settings:
        raise ConfigError(f"{', '.join(settings)} is a setting of the local engine; {kind} takes those of `servers`")
    return ServedModel(kind=kind, server=servers or ServerConfig())


@dataclass(frozen=True, kw_only=True)
class _Play:
    """One episode and the settings with which it is played."""

    task: Task
    seed: int
    limits: Limits
    sampling: SamplingConfig


def run_episode(
    env: str | type[TextEnv],
    player: ModelEngine | str,
    *,
    seed: int = 0,
    env_kwargs: dict[str, JSON] | None = None,
    limits: Limits | None = None,
    sampling: SamplingConfig | None = None,
) -> Trajectory:
    """Plays one episode of the environment's task `seed`, as training and evaluation do.

    `env` is an environment's id, path or class; `player` an engine of `create_engine`, or `oracle`, `cheat`, `random`.
    An environment that fails gives a trajectory with that `status` and `error`. Raises ConfigError or UnknownName for
    an environment or player that does not exist.
    """
    task = Task(code_path_of(env), seed, kwargs=env_kwargs or {})
    num_turns = turn_limit(
        task.env_id, task.kwargs
    )  # an environment that does not exist is an error here, not a failed episode
    limits = limits or Limits()
    if isinstance(player, ModelEngine):
        limits = replace(limits, turn_tokens=limits.turn_tokens_in(player.engine.context_window, num_turns))
    play = _Play(
        task=task,
        seed=seed,
        limits=limits,
        sampling=sampling or SamplingConfig(),
    )
    if isinstance(player, ModelEngine):
        return player.run(_with_engine(player, play))
    if player not in POLICIES:
        raise ConfigError(
            f"a player is an engine of create_engine, or {', '.join(POLICIES)}; got {player!r}: "
            f"create_engine({player!r}) loads a model"
        )
    return run_async(_with_policy(player, play))


async def _with_engine(player: ModelEngine, play: _Play) -> Trajectory:
    loop = RolloutLoop(player.engine, player.renderer, play.limits, play.sampling)
    return await _play(Sampler(loop), play)


async def _with_policy(policy: str, play: _Play) -> Trajectory:
    loop: EpisodeLoop = policy_loop(EvalConfig(env=play.task.env_id, policy=policy, max_turns=play.limits.max_turns))
    try:
        return await _play(Sampler(loop, played_env(policy)), play)
    finally:
        await loop.close()


async def _play(sampler: Sampler, play: _Play) -> Trajectory:
    try:
        return await sampler.play(Episode(play.task, "0/0", 0, play.seed))
    finally:
        sampler.close()
