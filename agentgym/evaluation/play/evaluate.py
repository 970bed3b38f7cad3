"""`evaluate`: held-out tasks, played by a model or a policy through the rollout that training uses."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from dataclasses import replace
from importlib import import_module
from os.path import expanduser, isdir
from pathlib import Path
from typing import Any

from agentgym.chat_templates.families import format_to_record, open_renderer
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.recorded_format import recorded_format
from agentgym.chat_templates.template_date import present_date
from agentgym.chat_templates.template_folder import chat_folder
from agentgym.data import open_data
from agentgym.embedded import EMBEDDED_MODELS
from agentgym.engines.openai.config import is_url
from agentgym.envs.base.card import card_of
from agentgym.envs.base.opponents import SELF
from agentgym.envs.base.policies import POLICIES
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.catalog.resolve import make_env, stem_of, turn_limit
from agentgym.errors import ConfigError, RunFolderError, UnknownName, nearest
from agentgym.evaluation.play.config import EvalConfig
from agentgym.evaluation.play.endpoint import endpoint_loop, endpoint_use, found_model
from agentgym.evaluation.play.eval_folder import EvalFolder, free_folder, missing, recorded_eval_date
from agentgym.evaluation.play.eval_result import EvalResult
from agentgym.evaluation.play.open_model import open_model
from agentgym.evaluation.play.policies import PolicyLoop, played_env
from agentgym.model.decoder_config import folder_window
from agentgym.model.model_name import names_model, with_digest
from agentgym.notebook.progress_view import ProgressView
from agentgym.rewards import RewardConfig, open_rewards
from agentgym.rollout.agents.agents import check_agent
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.episode_loop import EpisodeLoop
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.hosting.env_code import attempt, unwrap_user_outcome
from agentgym.rollout.hosting.env_host import make_task_env
from agentgym.rollout.hosting.event_loop import run_async
from agentgym.rollout.hosting.watchdog import watch_calls
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.environments_file import record_environments
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.rollout.sampling.self_play import seats_of
from agentgym.rollout.scores.intervals import ANY_REWARD
from agentgym.rollout.scores.statistics import summarize
from agentgym.tools.sandbox.service_settings import used_by_run
from agentgym.trajectory import Trajectory
from agentgym.types import JSON, Message, Task

__all__ = [
    "Driver",
    "EvalConfig",
    "EvalPlan",
    "EvalResult",
    "config_tasks",
    "count_prompt",
    "eval_episodes",
    "eval_tasks",
    "evaluate",
    "open_evaluation",
    "run_evaluation",
]

_log = logging.getLogger(__name__)
Driver = Callable[[RolloutLoop], AbstractAsyncContextManager[RolloutLoop]]
"""Replaces a model's loop with another one while the evaluation runs."""
HOST = re.compile(r"[\w.-]+:\d+(/|$)")
POLICY_TURN_TOKENS = 1 << 16
"""The limit of a reply's tokens for a policy without a model: large enough for any reply."""


def evaluate(
    config: EvalConfig | str | type[TextEnv],
    policy: str | None = None,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    on_episode: Callable[[Trajectory], None] | None = None,
    **settings: Any,  # those of EvalConfig, which checks them
) -> EvalResult:
    """Plays the evaluation and writes its folder; `on_episode` sees each episode when it is finished.

    Takes a configuration, or an environment (its id, path or class) and a policy, with further settings of
    `EvalConfig`: `evaluate("TextGame-v0", "oracle", num_tasks=20)`.

    Progress is a curve in a notebook, and lines on standard error in a script, unless `progress` is false. Without
    `output` the folder is a new one under `runs/`. With `resume` only missing or failed episodes are played.
    Raises ConfigError or UnknownName for what cannot be played, RunFolderError for a folder or model that is missing,
    taken or cannot be written, TrainingHalted if over half of the episodes fail.
    """
    if isinstance(config, EvalConfig):
        config = replace(config, **settings) if policy is None else replace(config, policy=policy, **settings)
    else:
        config = EvalConfig(**{"env": config, "policy": policy or "", **settings})
    with used_by_run(config.sandbox):
        plan = open_evaluation(config, None if output is None else Path(output), resume=resume)
        view = ProgressView(f"{plan.config.env}, {plan.config.policy}", is_shown=progress)
        return plan.run(_episode_counter(plan, view, on_episode))


def _episode_counter(
    plan: EvalPlan, view: ProgressView, on_episode: Callable[[Trajectory], None] | None
) -> Callable[[Trajectory], None]:
    """Returns a function that shows each episode's part in the progress, and passes it on to `on_episode`."""
    total = len(plan.episodes)
    successes: list[bool] = [bool(trajectory.success) for trajectory in plan.folder.kept.values()]

    def count(trajectory: Trajectory) -> None:
        successes.append(bool(trajectory.success))
        share = sum(successes) / len(successes)
        view.add(len(successes), success=share)
        view.count(len(successes), total, f"success {share:.2f}")
        if on_episode is not None:
            on_episode(trajectory)

    return count


def open_evaluation(config: EvalConfig, output: Path | None = None, *, resume: bool = False) -> EvalPlan:
    """Checks everything that can be checked before an episode is played, opens the folder, and returns the plan."""
    if resume and output is None:
        raise ConfigError("resume goes on in a folder that exists: name it with output (--output DIR)")
    if resume and output is not None and config.date is None:
        config = replace(config, date=recorded_eval_date(output))
    config = _check_config(config)
    played_by = config.endpoint.model if is_url(config.policy) else config.policy
    name = f"eval-{stem_of(config.env)}-{Path(played_by or '').name}"
    folder = output or free_folder(Path("runs") / name.replace(":", "-"))
    opened = EvalFolder(folder, config.to_json(), resume=resume)
    record_environments(folder, [config.env, *config.data.agents.values()])
    return EvalPlan(config, opened)


class EvalPlan:
    """An evaluation that is ready to run: its existing episodes, and those to be played."""

    def __init__(self, config: EvalConfig, folder: EvalFolder) -> None:
        self.config = config
        self.folder = folder
        tasks = config_tasks(config)
        self.episodes = eval_episodes(tasks, config.num_repeats, run_seed=config.seed)
        self.to_play = missing(self.episodes, folder.kept)

    def run(
        self, on_episode: Callable[[Trajectory], None] | None = None, *, driver: Driver | None = None
    ) -> EvalResult:
        """Plays the remaining episodes and writes the result; with a `driver`, other code leads the conversations."""

        def keep(trajectory: Trajectory) -> None:
            self.folder.write(trajectory)
            if on_episode is not None:
                on_episode(trajectory)

        driver = driver or (self._launch_agents if self.config.agent.name else None)
        stall_s = None if self.config.env_processes else self.config.stall_s
        with closing(self.folder), watch_calls(stall_s):
            played = run_async(_play(self.config, self.to_play, keep, driver)) if self.to_play else []
            whole = {**self.folder.kept, **{(trajectory.group, trajectory.member): trajectory for trajectory in played}}
            ordered = tuple(whole[episode.group, episode.member] for episode in self.episodes)
            summary = summarize(ordered, _reward_range(self.config))
            result = EvalResult(self.config, summary, self.folder.path, ordered, endpoint_use(ordered))
            self.folder.finish(ordered, result.to_json())
        return result

    def _launch_agents(self, loop: RolloutLoop) -> AbstractAsyncContextManager[RolloutLoop]:
        """Starts an agent for each episode; see `launched_agents`."""
        from agentgym.rollout.agents.launcher import launched_agents  # here: others need no server

        return launched_agents(loop, self.config.agent, self.folder.path / "agents")


def _reward_range(config: EvalConfig) -> tuple[float, float]:
    """Returns the least and the most that an episode can earn, as far as the environment's card says it."""
    if config.data.has_files or config.reward != RewardConfig():
        return ANY_REWARD
    env = make_env(config.env, config.env_kwargs)
    env.close()
    card = card_of(config.env, env)
    return ANY_REWARD if card is None else card.reward_range


def eval_tasks(env: str, num_tasks: int, env_kwargs: Mapping[str, JSON] | None = None) -> list[Task]:
    """Returns the first `num_tasks` held-out tasks of an environment: always the same ones."""
    return [Task(env, EVAL_SEED_START + index, kwargs=dict(env_kwargs or {})) for index in range(num_tasks)]


def config_tasks(config: EvalConfig) -> list[Task]:
    """Returns the held-out tasks of an evaluation: the rows of its data if it names some, else the environment's."""
    if not config.data.has_files:
        return eval_tasks(config.env, config.num_tasks, config.env_kwargs)
    tokenizer = config.tokenizer if config.policy in POLICIES or is_url(config.policy) else config.policy
    count = count_prompt(_open_renderer(chat_folder(tokenizer, config.chat_template), config))
    data = open_data(config.data, count, config.env)
    if not data.eval:
        raise ConfigError(
            "the data holds no tasks to evaluate on: name them with data.eval (--data.eval FILE), or hold some of"
            " data.train out with data.eval_fraction"
        )
    data.log_report()
    return [with_keywords(task, config.env, config.env_kwargs) for task in data.eval[: config.num_tasks]]


def with_keywords(task: Task, env: str, env_kwargs: Mapping[str, JSON]) -> Task:
    """Returns a row's task with the keywords of its environment; a task of another environment gets none."""
    return replace(task, kwargs=dict(env_kwargs)) if env_kwargs and task.env_id == env else task


def count_prompt(renderer: Renderer) -> Callable[[Sequence[Message]], int]:
    """Returns a function that counts the ids of a prompt as the model is shown it."""
    return lambda messages: len(renderer.render(messages, ()))


def eval_episodes(
    tasks: Sequence[Task], num_repeats: int = 1, *, run_seed: int = 0, step: int = 0, phase: str = "eval"
) -> list[Episode]:
    """Returns `num_repeats` episodes of each task, task by task; `step` and `phase` place them in a training run."""
    return [
        Episode(task, f"{step}/{index}", repeat, run_seed, step, phase)
        for index, task in enumerate(tasks)
        for repeat in range(num_repeats)
    ]


async def run_evaluation(
    sampler: Sampler, episodes: Sequence[Episode], on_episode: Callable[[Trajectory], None] | None = None
) -> list[Trajectory]:
    """Returns the trajectories of `episodes`, in order, by any engine of the sampler: a training run's, too."""
    return await sampler.run(episodes, on_episode=on_episode)


async def _play(
    config: EvalConfig,
    episodes: Sequence[Episode],
    on_episode: Callable[[Trajectory], None],
    driver: Driver | None = None,
) -> list[Trajectory]:
    settings = SamplerConfig(concurrency=config.concurrency, env_processes=config.env_processes)
    is_policy = config.policy in POLICIES
    async with AsyncExitStack() as stack:
        loop = await _loop(config, len(episodes))
        stack.push_async_callback(loop.close)
        if driver is not None:
            if not isinstance(loop, RolloutLoop):
                raise ConfigError(f"{config.policy} is a chat endpoint already: an agent can talk to it directly")
            loop = await stack.enter_async_context(driver(loop))
        rewards = await stack.enter_async_context(open_rewards(config.reward))
        make = played_env(config.policy) if is_policy else make_task_env
        sampler = Sampler(rewards.loop(loop), make, settings)
        stack.callback(sampler.close)
        if not rewards.together:
            return await run_evaluation(sampler, episodes, on_episode)
        scored = await rewards.score(await run_evaluation(sampler, episodes))
        for trajectory in scored:
            on_episode(trajectory)
        sampler.check(scored)
        return scored


async def _loop(config: EvalConfig, num_episodes: int) -> EpisodeLoop:
    """Returns the loop that plays the episodes."""
    if config.policy in POLICIES:
        return policy_loop(config)
    if is_url(config.policy):
        return await endpoint_loop(config.policy, config.endpoint, _limits(config), config.sampling)
    return await _model_loop(config, num_episodes)


def policy_loop(config: EvalConfig) -> PolicyLoop:
    """Returns the loop of a policy that needs no model."""
    limits = Limits(max_turns=config.max_turns, turn_tokens=POLICY_TURN_TOKENS)
    renderer = _open_renderer(chat_folder(config.tokenizer, config.chat_template), config)
    return PolicyLoop(renderer, limits, history=config.history)


async def _model_loop(config: EvalConfig, num_episodes: int) -> RolloutLoop:
    folder = chat_folder(config.policy, config.chat_template)
    renderer = _open_renderer(folder, config)
    engine = await open_model(folder, config.model_settings(min(config.concurrency, num_episodes)))
    return RolloutLoop(
        engine, renderer, _limits(config), config.sampling, history=config.history, compaction=config.compaction
    )


def _require_torch() -> None:
    try:
        import_module("agentgym.engines.local.engine")
    except ModuleNotFoundError as error:
        what = f"a model needs {error.name}, which is not installed"
        raise ConfigError(f"{what}: `agentgym doctor` shows the command") from error


def _check_config(config: EvalConfig) -> EvalConfig:
    """Returns the settings with an endpoint's model, or with the chat format and date of a local model.

    Raises like `_checked_policy`, and if there is no endpoint.
    """
    _check_seats(config)
    if not is_url(config.policy):
        return _checked_policy(config)
    make_env(config.env, config.env_kwargs).close()
    return replace(config, endpoint=found_model(config.policy, config.endpoint))


def _check_seats(config: EvalConfig) -> None:
    if config.env_kwargs.get("opponent") != SELF:
        return
    env = make_env(config.env, config.env_kwargs)
    seats = seats_of(env)
    env.close()
    if seats:
        raise ConfigError(
            f"an evaluation plays one agent, and opponent={SELF} leaves all of {', '.join(seats)} to it: name another"
            " opponent, such as --env-kwargs opponent=random"
        )


def _checked_policy(config: EvalConfig) -> EvalConfig:
    """Returns the settings with the chat format of the model or policy, and the date that its template writes.

    Raises for an environment, keywords, policy or model that do not exist, before anything is written.
    """
    if config.policy in POLICIES:
        task = Task(config.env, 0, kwargs=config.env_kwargs)
        opening = attempt(lambda: played_env(config.policy)(task))
        unwrap_user_outcome(opening, f"the {config.policy} policy of {config.env} cannot be made").close()
        return _with_chat_format(config, chat_folder(config.tokenizer, config.chat_template))
    check_agent(config.agent)
    num_turns = turn_limit(config.env, config.env_kwargs)
    if not (names_model(config.policy) or isdir(expanduser(config.policy))):
        kinds = [*EMBEDDED_MODELS, *POLICIES]
        near = nearest(config.policy, kinds) or "."
        if HOST.match(config.policy):
            near = f": did you mean 'http://{config.policy}'?"
        raise UnknownName(
            f"no policy and no model folder {config.policy!r}{near} "
            f"A policy is {', '.join(kinds)}, a model (its folder, .gguf file or hub id), or the http:// address of a "
            "chat endpoint"
        )
    folder = chat_folder(config.policy, config.chat_template)
    config = _with_chat_format(replace(config, policy=with_digest(config.policy)), folder)
    _require_torch()
    if not (folder / "config.json").is_file():
        raise RunFolderError(f"no model in {str(folder)!r}: it has a tokenizer, and no config.json")
    turn_tokens = _limits(config).turn_tokens_in(folder_window(folder), num_turns)
    return replace(config, turn_tokens=turn_tokens)


def _limits(config: EvalConfig) -> Limits:
    return Limits(
        max_turns=config.max_turns,
        turn_tokens=config.turn_tokens,
        context_window=config.context_window,
        stall_s=config.stall_s,
    )


def _with_chat_format(config: EvalConfig, folder: Path) -> EvalConfig:
    """Returns the settings with the chat format of a model folder, and with the date if its template writes one."""
    date = config.date or present_date()
    renderer = _open_renderer(folder, replace(config, date=date))
    family, written = format_to_record(renderer, config.family, date=date, given_date=config.date)
    variables = recorded_format(folder).variables_with(config.chat_template_kwargs)
    return replace(config, family=family, date=written, chat_template_kwargs=variables)


def _open_renderer(folder: Path, config: EvalConfig) -> Renderer:
    return open_renderer(folder, config.family, date=config.date, variables=config.chat_template_kwargs)
