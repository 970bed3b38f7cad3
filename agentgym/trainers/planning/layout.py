"""Splits of the GPUs into playing and learning: all of them, the best one, and changes if none fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentgym.trainers.planning.config import PlanConfig
from agentgym.trainers.planning.memory import EngineMemory, LearnerMemory, engine_memory, learner_memory
from agentgym.trainers.planning.timing import (
    GenerationEstimate,
    LearningEstimate,
    PlannedMachine,
    generation,
    learning,
    sync_s,
)

__all__ = ["GpuLayout", "best_layout", "layouts", "what_would_fit"]

GIB = 2**30
MOST_GPUS = 4096
MOST_SPLITS = 64


@dataclass(frozen=True, kw_only=True)
class GpuLayout:
    """A split of the GPUs, with its memory and speed."""

    kind: Literal["colocated", "disaggregated"]
    learners: int
    """The number of GPUs that learn."""
    engines: int
    engine_gpus: int
    """The number of GPUs of an engine."""
    learner_memory: LearnerMemory
    engine_memory: EngineMemory
    sequences: int
    """The number of whole episodes whose keys and values an engine holds."""
    generation: GenerationEstimate | None
    """The playing of a step; None if the engine does not fit."""
    learning: LearningEstimate
    sync_s: float
    problems: tuple[str, ...]
    """The parts that do not fit; empty if everything does."""
    overlaps: bool
    """True if engines play while the learners learn."""

    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        play_s = self.generation.seconds if self.generation else float("inf")
        work_s = max(play_s, self.learning.seconds) if self.overlaps else play_s + self.learning.seconds
        return work_s + self.sync_s

    @property
    def balance(self) -> float:
        """The seconds of playing over the seconds of learning; above 1, learners wait if both run at once."""
        return self.generation.seconds / self.learning.seconds if self.generation else float("inf")


def best_layout(machine: PlannedMachine, config: PlanConfig) -> GpuLayout:
    """Returns the fastest layout that fits, or the one with the fewest problems if none fits."""
    return min(layouts(machine, config), key=lambda layout: (len(layout.problems), layout.step_s, -layout.learners))


def layouts(machine: PlannedMachine, config: PlanConfig) -> Iterator[GpuLayout]:
    """Yields every layout that `layout`, `learners` and `engine.tensor_parallel` allow."""
    unit = config.learner.sequence_parallel * config.learner.tensor_parallel
    for engine_gpus in _engine_sizes(machine, config):
        if config.layout != "disaggregated" and config.learners is None and config.gpus % unit == 0:
            yield _layout(machine, config, config.gpus, engine_gpus, apart=False)
        if config.layout == "colocated" or config.gpus == 1:
            continue
        stride = unit * max(1, config.gpus // (unit * MOST_SPLITS))
        wanted = range(unit, config.gpus, stride) if config.learners is None else (config.learners,)
        for learners in wanted:
            if config.gpus - learners >= engine_gpus:
                yield _layout(machine, config, learners, engine_gpus, apart=True)


def _engine_sizes(machine: PlannedMachine, config: PlanConfig) -> Sequence[int]:
    if config.engine.tensor_parallel is not None:
        return (config.engine.tensor_parallel,)
    most = min(config.gpus, machine.device.per_node, machine.shape.num_heads)
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _layout(machine: PlannedMachine, config: PlanConfig, learners: int, engine_gpus: int, *, apart: bool) -> GpuLayout:
    memory, runtime = machine.device.memory, machine.rates.runtime_gib * GIB
    work = learning(machine, config, learners)
    held = replace(_learner_memory(machine, config, learners, work.micro_batches), runtime=runtime)
    resting = 0.0 if apart or config.learner.offload else held.resting
    engine = engine_memory(
        machine.shape, config.engine, gpus=engine_gpus, memory=memory, resting=resting, runtime=runtime
    )
    sequences = engine.sequences(config.episode.tokens)
    engines = (config.gpus - learners if apart else config.gpus) // engine_gpus
    problems = []
    if held.total > memory:
        problems.append(_too_large("the learner", held.total, memory, learners))
    if not engines or not sequences:
        needed = engine.weights + runtime + resting + engine.token * config.episode.tokens
        share = memory * config.engine.memory_fraction
        problems.append(_too_large("an engine with one episode", needed, share, engine_gpus))
    running = min(sequences, config.engine.max_running or sequences)
    return GpuLayout(
        kind="disaggregated" if apart else "colocated",
        learners=learners,
        engines=engines,
        engine_gpus=engine_gpus,
        learner_memory=held,
        engine_memory=engine,
        sequences=sequences,
        generation=generation(machine, config, engines=engines, gpus=engine_gpus, running=running)
        if running and engines
        else None,
        learning=work,
        sync_s=sync_s(machine, config, apart=apart),
        problems=tuple(problems),
        overlaps=apart and config.max_staleness > 0,
    )


def _learner_memory(machine: PlannedMachine, config: PlanConfig, ranks: int, parts: int) -> LearnerMemory:
    return learner_memory(
        machine.shape, config.learner, config.episode, ranks=ranks, group_size=config.group_size, parts=parts
    )


def _too_large(what: str, needed: float, there: float, gpus: int) -> str:
    on = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return f"{what} does not fit on {on}: {needed / GIB:,.0f} GiB each are needed, and there are {there / GIB:,.0f}"


def what_would_fit(machine: PlannedMachine, config: PlanConfig) -> list[str]:
    """Returns changes to the options with which everything would fit, the smallest first."""
    learner = config.learner
    single: Mapping[str, dict[str, object]] = {
        "--learner.activation-checkpointing": {"activation_checkpointing": True},
        f"--learner.micro-batch-tokens {config.episode.tokens}": {"micro_batch_tokens": config.episode.tokens},
        "--learner.gradients sharded": {"gradients": "sharded"},
        "--learner.offload": {"offload": True},
        "--learner.precision bfloat16": {"precision": "bfloat16"},
        "--learner.lora-rank 32": {"lora_rank": 32},
    }
    changes = {name: change for name, change in single.items() if replace(learner, **change) != learner}  # type: ignore[arg-type]
    changes |= {
        f"{first} {second}": changes[first] | changes[second]
        for first in list(changes)
        for second in list(changes)
        if first < second
    }
    found: list[str] = []
    for name, change in changes.items():
        if any(set(smaller.split(" --")) <= set(name.split(" --")) for smaller in found):
            continue
        if not best_layout(machine, replace(config, learner=replace(learner, **change))).problems:  # type: ignore[arg-type]
            found.append(name)
    return [*found[:4], *_more_gpus(machine, config)]


def _more_gpus(machine: PlannedMachine, config: PlanConfig) -> list[str]:
    sharded = replace(config.learner, gradients="sharded")
    found: dict[int, str] = {}
    for name, learner in (("", config.learner), ("--learner.gradients sharded", sharded)):
        gpus = 2 ** config.gpus.bit_length()
        while gpus <= MOST_GPUS:
            trial = replace(config, gpus=gpus, learners=None, layout="colocated", learner=learner)
            if not best_layout(machine, trial).problems:
                found.setdefault(gpus, f"--gpus {gpus} {name}".strip())
                break
            gpus *= 2
    return [found[gpus] for gpus in sorted(found)]
