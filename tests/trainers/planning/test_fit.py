"""Whether a run fits on its GPUs, and what would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentgym.errors import ConfigError
from agentgym.trainers.planning.config import EngineSpec, GpuSpec, PlanConfig
from agentgym.trainers.planning.find_shape import shape_of
from agentgym.trainers.planning.fit import memory_plan, what_would_fit
from agentgym.trainers.settings.cluster import ClusterConfig
from agentgym.trainers.settings.fsdp import FsdpConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.mesh import MeshConfig

SHARDED = LearnerConfig(fsdp=FsdpConfig(gradients="sharded"), activation_checkpointing=True)


def test_what_does_not_fit_is_named_and_what_is_offered_fits() -> None:
    plan = PlanConfig(model="32B", ray=ClusterConfig(learners=16), learner=replace(SHARDED, fsdp=FsdpConfig()))
    shape = shape_of("Qwen3-32B")
    assert any("the learner does not fit on 16 GPUs" in problem for problem in memory_plan(shape, plan).problems)
    assert "--learner.fsdp.gradients sharded" in what_would_fit(shape, plan)
    assert not memory_plan(
        shape, replace(plan, learner=replace(SHARDED, fsdp=FsdpConfig(gradients="sharded")))
    ).problems


def test_an_engine_that_does_not_fit_is_offered_more_gpus() -> None:
    plan = PlanConfig(model="70B", ray=ClusterConfig(learners=64), learner=SHARDED)
    shape = shape_of("Llama-3.1-70B")
    assert "an engine with one episode does not fit on 1 GPU" in memory_plan(shape, plan).problems[0]
    assert what_would_fit(shape, plan) == ["--engine.tensor-parallel 2"]
    assert not memory_plan(shape, replace(plan, engine=EngineSpec(tensor_parallel=2))).problems


def test_an_engine_that_shares_its_gpu_leaves_room_for_what_the_learner_keeps() -> None:
    apart = PlanConfig(model="4B")
    shared = replace(apart, ray=ClusterConfig(layout="colocated"))
    plans = [memory_plan(shape_of("Qwen3-4B"), plan) for plan in (apart, shared)]
    assert plans[0].engine.cache - plans[1].engine.cache == pytest.approx(plans[0].learner.resting)


def test_a_gpu_by_name_or_by_its_memory() -> None:
    assert GpuSpec(name="h200").memory == 140 * 2**30
    assert GpuSpec(name="mine", memory_gib=10).memory == 10 * 2**30
    with pytest.raises(ConfigError, match=r"give --gpu\.memory-gib"):
        GpuSpec(name="mine")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": 0}, "tasks must be at least 1"),
        ({"engine": EngineSpec(tensor_parallel=2), "ray": ClusterConfig(layout="colocated")}, "an engine on each GPU"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanConfig(**{"model": "8B", **settings})  # type: ignore[arg-type]


def test_a_layout_that_the_code_lacks_is_refused() -> None:
    ray, learner = ClusterConfig(learners=8), LearnerConfig(mesh=MeshConfig(sequence=2))
    with pytest.raises(ConfigError, match=r"transformers computes Qwen3-30B-A3B: leave learner\.mesh out"):
        memory_plan(shape_of("Qwen3-30B-A3B"), PlanConfig(model="30B-A3B", ray=ray, learner=learner))
    for expert, name, message in ((3, "Qwen3-30B-A3B", "128 experts"), (2, "Qwen3-8B", "this model has none")):
        plan = PlanConfig(
            model=name, ray=ClusterConfig(learners=12), learner=LearnerConfig(mesh=MeshConfig(expert=expert))
        )
        with pytest.raises(ConfigError, match=message):
            memory_plan(shape_of(name), plan)


def test_divided_experts_are_not_gathered_and_take_no_whole_gradients() -> None:
    shape, ray = shape_of("Qwen3-30B-A3B"), ClusterConfig(learners=8)
    memory = {}
    for expert in (1, 8):
        learner = LearnerConfig(mesh=MeshConfig(expert=expert))
        memory[expert] = memory_plan(shape, PlanConfig(model="30B-A3B", ray=ray, learner=learner)).learner
    layer = 128 * 3 * 768 * 2048
    assert memory[1].weights == memory[8].weights and memory[1].optimizer == memory[8].optimizer
    assert memory[1].gathered - memory[8].gathered == 2 * layer * 7 / 8 * 2, "of two layers, in bfloat16"
    assert memory[1].gradients - memory[8].gradients == 48 * layer * 7 / 8 * 4
