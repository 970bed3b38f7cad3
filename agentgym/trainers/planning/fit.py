"""Finds out whether a run fits on its GPUs, and changes with which it would."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from agentgym.errors import ConfigError
from agentgym.trainers.planning.config import GIB, PlanConfig
from agentgym.trainers.planning.memory import EngineMemory, LearnerMemory, engine_memory, learner_memory
from agentgym.trainers.planning.shapes import ModelShape

__all__ = ["MemoryPlan", "memory_plan", "what_would_fit"]

MAX_GPUS = 4096
ENGINE_GPUS = (1, 2, 4, 8)
Changes = dict[str, object]
"""Settings by their names, such as `{"learner.fsdp.gradients": "sharded"}`."""
MEMORY_SAVERS: Changes = {
    "learner.fsdp.gradients": "sharded",
    "learner.activation_checkpointing": True,
}
"""The settings that save memory on several ranks, in the order in which they are tried."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of a run's GPUs."""

    learner: LearnerMemory
    engine: EngineMemory
    sequences: int
    """The number of whole episodes whose keys and values an engine holds."""
    problems: tuple[str, ...]
    """The parts that do not fit; empty if everything does."""


def memory_plan(shape: ModelShape, config: PlanConfig) -> MemoryPlan:
    """Returns the memory of a learner's and an engine's GPU; raises ConfigError for a layout that the code lacks."""
    mesh = config.learner.mesh
    if shape.refusal and mesh.block > 1:
        raise ConfigError(
            f"ranks share passes of the fast decoder, and transformers computes {shape.name}: leave learner.mesh out"
        )
    mesh.check_experts(shape.experts.number if shape.experts and shape.layer_experts else 0, config.ranks)
    memory, tokens = config.gpu.memory, config.episode.tokens
    learner = learner_memory(shape, config)
    resting = learner.resting if config.is_colocated else 0.0
    engine = engine_memory(shape, config, resting=resting)
    problems = []
    if learner.total > memory:
        problems.append(_too_large("the learner", learner.total, memory, config.ranks))
    sequences = engine.sequences(tokens)
    if not sequences:
        needed = engine.weights + config.gpu.runtime + resting + engine.token * tokens
        share = memory * config.engine.memory_fraction
        problems.append(_too_large("an engine with one episode", needed, share, config.engine.tensor_parallel))
    return MemoryPlan(learner=learner, engine=engine, sequences=sequences, problems=tuple(problems))


def _too_large(what: str, needed: float, there: float, gpus: int) -> str:
    on = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return f"{what} does not fit on {on}: {needed / GIB:,.0f} GiB each are needed, and there are {there / GIB:,.0f}"


def what_would_fit(shape: ModelShape, config: PlanConfig) -> list[str]:
    """Returns changes to the options with which everything would fit, the smallest first."""
    engine = _larger_engine(shape, config)
    if engine and _fits(shape, config, engine):
        return [_as_options(engine)]
    single = _single_changes(config)
    pairs = [first | second for index, first in enumerate(single) for second in single[index + 1 :]]
    fits: list[Changes] = []
    for changes in [*single, *pairs]:
        if not any(smaller.items() <= changes.items() for smaller in fits) and _fits(shape, config, engine | changes):
            fits.append(changes)
    return [_as_options(engine | changes) for changes in [*fits[:4], *_more_gpus(shape, config, engine)]]


def _larger_engine(shape: ModelShape, config: PlanConfig) -> Changes:
    """Returns the fewest GPUs on which an engine fits that has its own; nothing if it fits already, or on none."""
    for gpus in () if config.is_colocated else ENGINE_GPUS:
        larger = replace(config, engine=replace(config.engine, tensor_parallel=gpus))
        if engine_memory(shape, larger).sequences(config.episode.tokens):
            return {"engine.tensor_parallel": gpus} if gpus > config.engine.tensor_parallel else {}
    return {}


def _single_changes(config: PlanConfig) -> list[Changes]:
    changes: list[Changes] = [
        {"learner.activation_checkpointing": True},
        {"learner.micro_batch_tokens": config.episode.tokens},
        {"learner.lora.rank": 32},
    ]
    if config.ranks > 1:
        changes.append({"learner.fsdp.gradients": "sharded"})
    if config.compute_dtype == "float32":
        changes.append({"learner.dtype": "bfloat16"})
    return [change for change in changes if _apply_changes(config, change) not in (None, config)]


def _more_gpus(shape: ModelShape, config: PlanConfig, engine: Changes) -> list[Changes]:
    """Returns the fewest learners with which everything fits, for each number of further changes."""
    changes_by_ranks: dict[int, Changes] = {}
    for count in range(len(MEMORY_SAVERS) + 1):
        further = dict(list(MEMORY_SAVERS.items())[:count])
        ranks = 2 ** config.ranks.bit_length()
        while ranks <= MAX_GPUS:
            changes: Changes = {"ray.learners": ranks, **further}
            if config.is_colocated:
                changes["ray.engines"] = ranks
            if _fits(shape, config, engine | changes):
                changes_by_ranks.setdefault(ranks, changes)
                break
            ranks *= 2
    return [changes_by_ranks[ranks] for ranks in sorted(changes_by_ranks)]


def _fits(shape: ModelShape, config: PlanConfig, changes: Changes) -> bool:
    changed = _apply_changes(config, changes)
    return changed is not None and not memory_plan(shape, changed).problems


def _apply_changes(config: PlanConfig, changes: Changes) -> PlanConfig | None:
    """Returns the settings with the changes; None for settings that exclude each other."""
    try:
        changed: PlanConfig = _replace_nested(config, changes)
    except ConfigError:
        return None
    return changed


def _replace_nested(settings: Any, changes: Changes) -> Any:
    """Returns a dataclass with the changes, whose names are paths (`lora.rank`)."""
    own: Changes = {}
    parts: dict[str, Changes] = {}
    for name, value in changes.items():
        part, dot, inner = name.partition(".")
        if dot:
            parts.setdefault(part, {})[inner] = value
        else:
            own[name] = value
    own |= {part: _replace_nested(getattr(settings, part), inner) for part, inner in parts.items()}
    return replace(settings, **own)


def _as_options(changes: Changes) -> str:
    options = [[f"--{name.replace('_', '-')}", "" if value is True else str(value)] for name, value in changes.items()]
    return " ".join(" ".join(words).strip() for words in options)
