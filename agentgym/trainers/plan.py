"""What a run would do and need, before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from agentgym.chat_templates import renderer_for
from agentgym.embedded import embedded_folder
from agentgym.engines.hf_checkpoint import load_decoder
from agentgym.envs.resolve import make_env
from agentgym.errors import ConfigError
from agentgym.trainers.config import TrainConfig
from agentgym.types import JSON, Message

__all__ = ["PlanLine", "describe_plan"]

PlanLine = tuple[str, int, str]
"""Name, number, and what it is."""
BYTES = 4
PROCESS_MB = 750
"""What Python, torch, its compiled kernels and the other libraries hold, as measured."""


def describe_plan(config: TrainConfig) -> list[PlanLine]:
    """Counts of a run and a rough bound of its memory; makes one environment and loads the model to look at them."""
    config = config.resolved
    folder = embedded_folder() if config.model == "embedded" else Path(config.model)
    renderer, model = renderer_for(folder, config.family), load_decoder(folder)
    env = make_env(config.env, cast(Mapping[str, JSON], config.env_kwargs))
    _, info = env.reset(seed=config.seed)
    system = (Message("system", env.system_prompt),) if env.system_prompt else ()
    prompt = len(renderer.render([*system, *info["messages"]], env.tool_specs))
    env.close()
    shape = model.config
    window = min(config.limits.context_window or shape.context_window, shape.context_window)
    if prompt + 1 > window:
        raise ConfigError(
            f"the first prompt has {prompt} tokens and the window only {window}: nothing could be sampled"
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    cache = 2 * config.hf.num_slots * window * shape.num_layers * shape.num_kv_heads * shape.head_width
    threads = config.learner.threads or 2
    layer_floats = 12 * shape.width + 4 * shape.ffn_width + 4 * shape.num_heads * shape.head_width
    activations = threads * max(config.learner.micro_batch_tokens, window) * shape.num_layers * layer_floats
    learner = config.learner
    copies = 4 + threads + (4 if learner.critic.trunk == "own" else 0) + (1 if learner.kl.coefficient else 0)
    memory = PROCESS_MB + (copies * parameters + cache + activations) * BYTES // 1_000_000
    episodes = config.episodes_per_step
    return [
        *_servers(config),
        ("tasks per step", config.tasks, "prompts; each is one group"),
        ("episodes per step", episodes, f"{config.tasks} tasks x group size {config.group_size}"),
        ("optimizer steps", config.steps * learner.steps_per_batch, f"{learner.steps_per_batch} after each batch"),
        ("episodes in all", episodes * config.steps, f"and {2 * config.eval_episodes} held-out ones"),
        ("first prompt tokens", prompt, f"of a window of {window}"),
        ("most tokens per step", episodes * window, "if every episode filled the window"),
        ("micro-batch tokens", config.learner.micro_batch_tokens, "of one forward and backward pass"),
        ("model parameters", parameters, f"{shape.family}, {shape.num_layers} layers of width {shape.width}"),
        ("memory MB", memory, "a rough bound: weights, optimizer, cache, activations, libraries"),
    ]


def _servers(config: TrainConfig) -> list[PlanLine]:
    """Which servers sample; none are launched or asked for it."""
    if config.engine == "hf":
        return []
    given = config.sglang if config.engine == "sglang" else config.vllm
    if given.urls:
        return [(f"{config.engine} servers", len(given.urls), f"that run: {', '.join(given.urls)}")]
    return [(f"{config.engine} servers", given.replicas, f"launched with {given.python or sys.executable}")]
