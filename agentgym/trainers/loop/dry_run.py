"""Describes what a run would do and need, before anything starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.local.kv_cache import fitting_slots
from agentgym.envs.catalog.resolve import make_env
from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_name import model_folder
from agentgym.model.policy import backend_line, empty_policy
from agentgym.remote import RemoteFolder
from agentgym.rewards import open_rewards
from agentgym.tools.calling.worker import run_sync
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.lora import adapt
from agentgym.trainers.learner.pass_tokens import activation_numbers
from agentgym.trainers.loop.observer import own_observers
from agentgym.trainers.loop.open_parts import import_cluster
from agentgym.trainers.loop.resolve_run import resolve_run
from agentgym.trainers.loop.self_play import rival_folder
from agentgym.trainers.parts.engine import (
    check_model_settings,
    engine_window,
    learner_bytes,
    load_model,
    require_engine,
)
from agentgym.trainers.tasks import EnvChoice, env_choices
from agentgym.trainers.tasks.mix import apportion
from agentgym.trainers.trackers import Tracking
from agentgym.types import JSON, Message, Task

__all__ = ["PlanLine", "check_names", "describe_plan"]

PlanLine = tuple[str, int, str]
"""A line of the plan: its name, its number, and an explanation."""
BYTES = 4
PROCESS_MB = 750
"""The measured memory of Python, torch, its compiled kernels and the other libraries."""


def describe_plan(config: TrainConfig, resumed: Path | None = None) -> list[PlanLine]:
    """Returns the counts of a run, or one `resumed` in a folder, and a rough bound of its memory; loads the model."""
    run = resolve_run(config, resumed)
    config, folder, renderer, source = run.config, run.model_folder, run.renderer, run.source
    model = load_model(folder, config)
    check_model_settings(model, config)
    choices = env_choices(config.practice, config.env, cast(Mapping[str, JSON], config.env_kwargs))
    held_out = config.eval.episodes
    if config.data.has_files:
        tasks, held_out = source.train_tasks(1, range(config.tasks)), len(source.eval_tasks(held_out))
    else:
        tasks = [Task(choice.env, config.seed, kwargs=kwargs) for choice in choices for kwargs in choice.variants]
    prompt = max(_prompt_tokens(task, renderer) for task in tasks)
    reserved = engine_window(config, model)
    window = min(reserved, config.limits.context_window or reserved)
    if prompt + 1 > window:
        raise ConfigError(f"the first prompt has {prompt} tokens, the window only {window}: nothing could be sampled")
    parameters = model.num_parameters
    num_slots = config.local.num_slots or fitting_slots(model, reserved, reserve_bytes=learner_bytes(config, model))
    cache = 2 * num_slots * reserved * sum(kv.num_heads * kv.width for kv in model.kv_shapes)
    learner, ahead = config.learner, config.max_staleness > 0
    threads = learner.threads or 2
    activations = threads * max(learner.pass_tokens, window) * model.num_layers * activation_numbers(model)
    trained, what = _count_trained_parameters(model, config)
    critics = 2 if learner.critic.trunk == "own" else 1  # gradients and AdamW's two means, for each
    weights = parameters * (critics + (1 if learner.kl.coefficient else 0))
    weights = 2 * parameters + critics * trained if learner.lora.rank else weights  # the base, and with adapters merged
    weights += (3 * critics + threads) * trained + (parameters if ahead and config.engine == "local" else 0)
    memory = PROCESS_MB + (weights + cache + activations) * BYTES // 1_000_000
    episodes, num_held_out = config.episodes_per_step, config.eval.num_played(config.steps, held_out)
    return [
        *_servers(config),
        *_actors(config),
        ("tasks per step", config.tasks, "prompts; each is one group"),
        *([("most groups ahead", config.tasks * (config.max_staleness + 1), "played while steps learn")] * ahead),
        ("episodes per step", episodes, f"{config.tasks} tasks x group size {config.group_size}"),
        *_practice(config, choices),
        ("optimizer steps", config.steps * learner.steps_per_batch, _describe_steps(config)),
        ("episodes in all", episodes * config.steps, f"and {num_held_out} held-out ones"),
        ("first prompt tokens", prompt, f"of a window of {window}"),
        ("most tokens per reply", min(config.limits.turn_tokens or window, window), "limits.turn_tokens"),
        ("most tokens per step", episodes * window, "if every episode filled the window"),
        ("micro-batch tokens", config.learner.pass_tokens, "of one forward and backward pass"),
        ("model parameters", parameters, _describe(model, folder)),
        ("trained parameters", trained, what),
        ("memory MB", memory, "a rough bound: weights, optimizer, cache, activations, libraries"),
    ]


def check_names(config: TrainConfig) -> None:
    """Raises for a part of a run that the plan does not need, and that does not exist or cannot be opened.

    They are rewards, observers, trackers, other models, the engine and the address of the copy.
    """
    own_observers(config.observers)
    Tracking(config.trackers, config.tracking)
    run_sync(_open_rewards(config))
    if config.learner.kl.reference is not None:
        empty_policy(model_folder(config.learner.kl.reference))
    if config.rival is not None:
        rival_folder(config.rival)
    if config.checkpoint.copy_to is not None:
        RemoteFolder(config.checkpoint.copy_to)
    if config.executor == "ray":
        import_cluster()
    else:
        require_engine(config)


async def _open_rewards(config: TrainConfig) -> None:
    async with open_rewards(config.reward):
        pass


def _describe(model: LanguageModel, folder: Path) -> str:
    if isinstance(model, Decoder):
        return f"{model.config.family}, {model.config.num_layers} layers of width {model.config.width}"
    return f"{model.num_layers} layers of width {model.width}; {backend_line(model, folder)}"


def _describe_steps(config: TrainConfig) -> str:
    optimizer, each = config.optimizer, config.learner.steps_per_batch
    return f"{each} after each batch, by {optimizer.name} at a rate of {optimizer.peak_rate:g}"


def _count_trained_parameters(model: LanguageModel, config: TrainConfig) -> tuple[int, str]:
    """Returns how many parameters of the policy are trained, and which; adds adapters to the model for LoRA."""
    lora = config.learner.lora
    if not lora.rank:
        return model.num_parameters, "all of the model's"
    trained = sum(parameter.numel() for parameter in adapt(model, lora).parameters() if parameter.requires_grad)
    rate = lora.optimizer_settings(config.optimizer).learning_rate
    return trained, f"adapters of rank {lora.rank} on {', '.join(lora.target_modules)}, at a learning rate of {rate:g}"


def _prompt_tokens(task: Task, renderer: Renderer) -> int:
    """Returns the number of tokens of a task's first prompt."""
    env = make_env(task.env_id, task.kwargs)
    _, info = env.reset(seed=task.seed, options=dict(task.options) or None)
    system = (Message("system", env.system_prompt),) if env.system_prompt else ()
    prompt = renderer.render([*system, *info["messages"]], env.tool_specs)
    env.close()
    return len(prompt)


def _practice(config: TrainConfig, choices: Sequence[EnvChoice]) -> list[PlanLine]:
    """Returns the lines on a step's tasks: mix, curriculum, replay and filter, if they are used."""
    practice, tasks = config.practice, config.tasks
    lines: list[PlanLine] = []
    if practice.mix:
        shares = apportion([choice.weight for choice in choices], tasks)
        parts = ", ".join(f"{share} of {choice.name}" for share, choice in zip(shares, choices, strict=True))
        lines.append(("environments", len(choices), f"in the first step {parts}"))
    for choice in choices:
        curriculum, kwargs = choice.curriculum, json.dumps(dict(choice.kwargs))
        if curriculum.method != "off":
            values = ", ".join(map(str, curriculum.values))
            what = f"{curriculum.by} = {values}, by {curriculum.method}; held-out tasks have the keywords {kwargs}"
            lines.append((f"levels of {choice.name}", len(curriculum.values), what))
    if practice.replay.share:
        bounds = " to ".join(f"{bound:g}" for bound in practice.replay.success)
        what = f"at most, of a step: earlier ones whose groups had a success of {bounds}"
        lines.append(("replayed tasks", int(tasks * practice.replay.share + 1e-9), what))
    if practice.filter != "off":
        max_episodes = config.episodes_per_step * (1 + practice.max_refills)
        what = f"groups of equal {practice.filter} are replaced in up to {practice.max_refills} rounds"
        lines.append(("most episodes per step", max_episodes, what))
    return lines


def _actors(config: TrainConfig) -> list[PlanLine]:
    """Returns the lines on the actors of a run on a cluster, without asking the cluster."""
    cluster = config.cluster
    if config.executor == "local":
        return []
    cpus = sum(bundle.get("CPU", 0) for bundle in cluster.bundles)
    gpus = sum(bundle.get("GPU", 0) for bundle in cluster.bundles)
    own = [
        ("reference ranks", cluster.references, "processes that have the reference of the KL term"),
        ("critic ranks", cluster.critics, "processes that have and train the critic"),
    ]
    return [
        ("learner ranks", cluster.learners, "processes that share the learner"),
        ("engine actors", cluster.engines, "replicas: each samples in its process, or has a server"),
        *(line for line in own if line[1]),
        ("worker actors", cluster.workers, "processes that play episodes"),
        ("bundles", len(cluster.bundles), f"{cpus:g} CPU and {gpus:g} GPU in all, placed by {cluster.placement}"),
    ]


def _servers(config: TrainConfig) -> list[PlanLine]:
    """Returns the lines on the servers that sample, without launching or asking any."""
    if not config.on_servers:
        return []
    server = config.server
    if server.urls:
        return [(f"{config.engine} servers", len(server.urls), f"that run: {', '.join(server.urls)}")]
    number = server.replicas if config.executor == "local" else config.ray.engines
    return [(f"{config.engine} servers", number, f"launched with {server.python or sys.executable}")]
