"""`agentgym plan`: predicts the memory that a run needs, before there is a machine for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from agentgym.cli.display.tables import show_table
from agentgym.cli.options import parse_options, with_full_names
from agentgym.cli.terminal import fail, say, show_json
from agentgym.trainers.planning.config import GIB, PlanConfig
from agentgym.trainers.planning.find_shape import shape_of
from agentgym.trainers.planning.fit import MemoryPlan, memory_plan, what_would_fit
from agentgym.trainers.planning.shapes import ModelShape
from agentgym.types import JSON

__all__ = ["main"]

MAIN_SETTINGS = tuple(
    "model gpu.name gpu.memory_gib tasks group_size episode.prompt_tokens episode.reply_tokens episode.tool_tokens "
    "episode.turns learner.dtype learner.micro_batch_tokens learner.lora.rank learner.activation_checkpointing "
    "learner.fsdp.gradients learner.mesh.sequence learner.mesh.expert optimizer.name "
    "ray.learners ray.layout engine.dtype engine.tensor_parallel engine.memory_fraction json".split()
)
"""The settings that `--help` shows."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Predicts the memory of a learner's and an engine's GPU. Settings of `agentgym train` have the same names.

    Exit code 1 if something does not fit; what would fit is then shown.
    """

    run: Annotated[PlanConfig, tyro.conf.arg(name="")]
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym plan ...`."""
    args = with_full_names(args, {"--gpu": "--gpu.name"})
    options = parse_options(PlanOptions, args, prog="agentgym plan", main_options=MAIN_SETTINGS)
    config = options.run
    shape = shape_of(config.model)
    plan = memory_plan(shape, config)
    advice = what_would_fit(shape, config) if plan.problems else []
    _show(shape, config, plan)
    for problem in plan.problems:
        fail(problem)
    if plan.problems:
        fail(f"what would fit: {'; or '.join(advice)}" if advice else "nothing near would fit: take a smaller --model")
    if options.json:
        show_json(_as_json(shape, config, plan, advice))
    return 1 if plan.problems else 0


def _show(shape: ModelShape, config: PlanConfig, plan: MemoryPlan) -> None:
    if shape.refusal:
        say(f"note: transformers computes this model: {shape.refusal}")
    kib = shape.kv_floats * config.engine.cache_bytes / 1024
    say(
        f"{shape.name}: {shape.num_parameters:,} parameters, {kib:,.{0 if kib >= 10 else 1}f} KiB of keys and values a"
        f" token; {config.gpu.name}, {config.gpu.memory / GIB:,.0f} GiB"
    )
    rows = [[f"learner: {name}", _gib(size)] for name, size in plan.learner.parts.items()]
    rows += [
        ["learner, at the largest", _gib(plan.learner.total)],
        ["engine: weights", _gib(plan.engine.weights)],
        ["engine: keys and values", f"{_gib(max(0.0, plan.engine.cache))}: {plan.sequences:,} whole episodes"],
    ]
    show_table(["memory of a GPU", "GiB"], rows)


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size < 10 * GIB else f"{size / GIB:,.1f}"


def _as_json(shape: ModelShape, config: PlanConfig, plan: MemoryPlan, advice: Sequence[str]) -> dict[str, JSON]:
    return {
        "model": shape.name,
        "parameters": shape.num_parameters,
        "refusal": shape.refusal or None,
        "gpu": config.gpu.name,
        "gpu_gib": round(config.gpu.memory / GIB, 4),
        "fits": not plan.problems,
        "problems": list(plan.problems),
        "would_fit": list(advice),
        "learner_gpus": config.ranks,
        "engine_gpus": config.engine.tensor_parallel,
        "learner_memory_gib": {name: round(size / GIB, 4) for name, size in plan.learner.parts.items()},
        "learner_total_gib": round(plan.learner.total / GIB, 4),
        "engine_weights_gib": round(plan.engine.weights / GIB, 4),
        "engine_cache_gib": round(plan.engine.cache / GIB, 4),
        "engine_sequences": plan.sequences,
    }
