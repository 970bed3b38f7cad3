"""Splits of the GPUs: what they cost, which one is best, and what would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentgym.errors import ConfigError
from agentgym.trainers.planning.config import EngineSpec, EpisodeSpec, GpuSpec, LearnerSpec, PlanConfig
from agentgym.trainers.planning.layout import best_layout, layouts, what_would_fit
from agentgym.trainers.planning.rates import ASSUMED, Rates, RatesSpec, device_of
from agentgym.trainers.planning.shapes import shape_of
from agentgym.trainers.planning.timing import PlannedMachine, decode_step_s, generation, learning

PLAN = PlanConfig(
    model="8B",
    gpus=16,
    tasks=32,
    group_size=8,
    max_staleness=2,
    concurrency=512,
    learner=LearnerSpec(gradients="sharded"),
)
EXACT = Rates(
    train_mfu=1, prefill_mfu=1, decode_mfu=1, decode_bandwidth=1, decode_layer_us=0, hop_us=0, link=1, runtime_gib=0
)


def machine(config: PlanConfig, rates: Rates = ASSUMED) -> PlannedMachine:
    return PlannedMachine(shape=shape_of(config.model), device=device_of(config.gpu, config.learner), rates=rates)


def test_the_best_split_is_the_fastest_of_all_that_fit() -> None:
    best, found = best_layout(machine(PLAN), PLAN), list(layouts(machine(PLAN), PLAN))
    assert not best.problems
    assert best.step_s == min(one.step_s for one in found if not one.problems)
    assert {one.kind for one in found} == {"colocated", "disaggregated"}
    assert all(one.learners + one.engines * one.engine_gpus <= 16 for one in found if one.kind == "disaggregated")


def test_more_to_sample_moves_gpus_to_the_engines() -> None:
    split = replace(PLAN, layout="disaggregated", engine=EngineSpec(tensor_parallel=1))
    reads = replace(split, episode=EpisodeSpec(prompt_tokens=6000, reply_tokens=50))
    writes = replace(split, episode=EpisodeSpec(prompt_tokens=50, reply_tokens=1000))
    assert best_layout(machine(writes), writes).learners < best_layout(machine(reads), reads).learners


def test_what_overlaps_takes_as_long_as_the_longer_of_both() -> None:
    apart = replace(PLAN, layout="disaggregated", learners=8)
    both = best_layout(machine(apart), apart)
    assert both.generation is not None
    assert both.step_s == max(both.generation.seconds, both.learning.seconds) + both.sync_s
    turns = best_layout(machine(apart), replace(apart, max_staleness=0))
    assert turns.generation is not None
    assert turns.step_s == turns.generation.seconds + turns.learning.seconds + turns.sync_s


def test_learning_takes_its_operations_over_what_the_gpus_do() -> None:
    one = learning(machine(PLAN, EXACT), PLAN, 1)
    episode, shape = PLAN.episode, shape_of("8B")
    prompts = 2  # a micro-batch of 16,384 tokens has room for 6 further rows of 2,200 behind a prompt of 1,000
    tokens = 32 * (prompts * 1000 + 8 * (episode.tokens - 1000))
    assert one.computed_tokens == tokens
    matrices = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12_288)
    head = 4096 * 151_936 * 32 * 8 * 1600
    pairs = 32 * (prompts * 1000**2 + 8 * (3200**2 - 1000**2)) / 2
    flops = 4 * (2 * tokens * matrices + 4 * 36 * 4096 * pairs) + 4 * 2 * head
    assert one.flops == pytest.approx(flops)
    assert one.compute_s == pytest.approx(flops / 989e12)
    assert learning(machine(PLAN, EXACT), PLAN, 8).compute_s == pytest.approx(one.compute_s / 8)
    assert shape.num_heads == 32


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    plain = replace(PLAN, learner=LearnerSpec(activation_checkpointing=False))
    adapters = replace(plain, learner=replace(plain.learner, lora_rank=8))
    whole, thin = (learning(machine(one, EXACT), one, 1) for one in (plain, adapters))
    head = 4 * 2 * 4096 * 151_936 * 32 * 8 * 1600
    assert thin.flops - head == pytest.approx((whole.flops - head) * 2 / 3)


def test_a_decoding_step_reads_the_weights_and_all_keys_and_values() -> None:
    exact = machine(PLAN, replace(EXACT, decode_mfu=1e9))
    weights = 2 * (8_190_735_360 - 151_936 * 4096)
    step_s = decode_step_s(exact, EngineSpec(), 1, 8, 1000)
    assert step_s == pytest.approx((weights + 8 * 1000 * 147_456) / 3350e9)


def test_engines_that_are_never_away_sample_for_all_live_episodes() -> None:
    plan = replace(PLAN, concurrency=64, episode=EpisodeSpec(prompt_tokens=1, tool_tokens=0, tool_s=0, host_ms=0))
    found = generation(machine(plan), plan, engines=2, gpus=1, running=1000)
    assert found.batch == pytest.approx(32, rel=1e-3)
    step_s = decode_step_s(machine(plan), plan.engine, 1, 32, plan.episode.context)
    assert found.tokens_per_s == pytest.approx(64 / step_s, rel=1e-2)


def test_by_littles_law_live_episodes_are_the_rate_times_their_seconds() -> None:
    plan = replace(PLAN, concurrency=64, episode=EpisodeSpec(prompt_tokens=1, tool_tokens=0, tool_s=50, host_ms=0))
    found = generation(machine(plan), plan, engines=1, gpus=1, running=1000)
    rate = plan.episodes / found.seconds
    step_s = decode_step_s(machine(plan), plan.engine, 1, max(1, found.batch), plan.episode.context)
    assert rate * (4 * 50 + 1600 * step_s) == pytest.approx(64, rel=0.01)


def test_a_worker_bounds_what_is_played() -> None:
    slow = replace(PLAN, episode=EpisodeSpec(host_ms=500))
    one, four = (
        generation(machine(plan), plan, engines=8, gpus=1, running=1000) for plan in (slow, replace(slow, workers=4))
    )
    assert one.seconds == pytest.approx(256 * 4 * 0.5)
    assert four.seconds == pytest.approx(one.seconds / 4, rel=0.5)


def test_the_longest_episode_is_waited_for_only_where_none_may_be_stale() -> None:
    even, long = (replace(PLAN, max_staleness=0, episode=EpisodeSpec(spread=spread)) for spread in (1, 3))
    found = [generation(machine(plan), plan, engines=8, gpus=1, running=1000) for plan in (even, long)]
    assert found[0].tail_s == 0
    assert found[1].seconds == pytest.approx(found[0].seconds + found[1].tail_s)
    stale = replace(long, max_staleness=1)
    assert generation(machine(stale), stale, engines=8, gpus=1, running=1000).tail_s == 0


def test_what_does_not_fit_is_named_and_what_is_offered_fits() -> None:
    plan = PlanConfig(model="32B", gpus=16)
    best = best_layout(machine(plan), plan)
    assert any("the learner does not fit on 16 GPUs" in one for one in best.problems)
    offers = what_would_fit(machine(plan), plan)
    assert "--learner.gradients sharded" in offers
    changed = replace(plan, learner=replace(plan.learner, gradients="sharded"))
    assert not best_layout(machine(changed), changed).problems
    gpus = [int(one.split()[1]) for one in offers if one.startswith("--gpus") and "sharded" not in one]
    more = replace(plan, gpus=gpus[0])
    assert not best_layout(machine(more), more).problems


def test_an_engine_that_shares_its_gpu_leaves_room_for_what_the_learner_keeps() -> None:
    plan = PlanConfig(model="4B", gpus=1, layout="colocated", learner=LearnerSpec(precision="bfloat16"))
    stays = best_layout(machine(plan), plan)
    leaves = best_layout(machine(plan), replace(plan, learner=replace(plan.learner, offload=True)))
    assert leaves.engine_memory.cache - stays.engine_memory.cache == pytest.approx(stays.learner_memory.resting)


def test_rates_that_are_given_are_not_assumed() -> None:
    found = ASSUMED.with_overrides(RatesSpec(train_mfu=0.5, decode_layer_us=0))
    assert (found.train_mfu, found.decode_layer_us) == (0.5, 0)
    assert not {"train_mfu", "decode_layer_us"} & set(found.assumed)
    assert "prefill_mfu" in found.assumed
    with pytest.raises(ConfigError, match=r"rates\.train_mfu must be above 0"):
        RatesSpec(train_mfu=0)


def test_a_gpu_by_name_or_by_its_figures() -> None:
    assert device_of(GpuSpec(name="h200"), LearnerSpec()).bandwidth == 4800e9
    own = GpuSpec(name="mine", memory_gib=10, tflops=1, memory_gb_s=2, link_gb_s=3)
    assert device_of(own, LearnerSpec()).memory == 10 * 2**30
    with pytest.raises(ConfigError, match=r"--gpu\.memory-gib --gpu\.tflops"):
        device_of(GpuSpec(name="mine"), LearnerSpec())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"gpus": 4, "learners": 4}, "leave none to play"),
        ({"learners": 1, "layout": "colocated"}, "disaggregated layout"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanConfig(**{"model": "8B", **settings})  # type: ignore[arg-type]
