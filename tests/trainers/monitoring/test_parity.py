"""The parity gate: what an engine samples from is held against what is trained, and a difference gets its cause."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import agentgym.trainers.loop.open_parts as parts_module
import agentgym.trainers.loop.run as run_module
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.errors import ConfigError, TrainingHalted
from agentgym.rollout.limits import Limits
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.mismatch import Mismatch, MismatchBound, MismatchFound, MismatchSums
from agentgym.trainers.monitoring.parity import ParityGate
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.parity import ParityConfig
from agentgym.trainers.settings.sampling import TrainSamplingConfig

Train = Callable[..., Any]


class OtherEngine(LocalEngine):
    """An engine like the in-process one, that takes liberties."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        return self.altered(await super().generate(prompt_ids, self.taken(sampling), session=session))

    def taken(self, sampling: Sampling) -> Sampling:
        return sampling

    def altered(self, completion: Completion) -> Completion:
        return completion


class Warm(OtherEngine):
    """Samples at temperature 1 whatever is asked for."""

    def taken(self, sampling: Sampling) -> Sampling:
        return replace(sampling, temperature=1.0)


class Cut(OtherEngine):
    """Samples from the nucleus, as a server does that takes top_p from the model's generation_config.json."""

    def taken(self, sampling: Sampling) -> Sampling:
        return replace(sampling, top_p=0.7)


class Foreign(OtherEngine):
    """Says what another model would, and is sure of it."""

    def taken(self, sampling: Sampling) -> Sampling:
        return replace(sampling, temperature=9.0)

    def altered(self, completion: Completion) -> Completion:
        return replace(completion, logprobs=(0.0,) * len(completion.ids))


class Rounded(OtherEngine):
    """Computes logprobs in bfloat16."""

    def altered(self, completion: Completion) -> Completion:
        rounded = torch.tensor(completion.logprobs).bfloat16().float()
        return replace(completion, logprobs=tuple(min(0.0, float(logprob) - 0.002) for logprob in rounded))


class Deaf(OtherEngine):
    """Ignores weight updates: it samples from the weights that it began with."""

    def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(copy.deepcopy(model), *arguments, **options)

    async def update_weights(self, weights: Any, version: int) -> WeightSync:
        return await super().update_weights({}, self.version)


class Lying(Deaf):
    """Ignores the weights and takes their number."""

    async def update_weights(self, weights: Any, version: int) -> WeightSync:
        return await LocalEngine.update_weights(self, {}, version)


@pytest.fixture
def train_on(small_run: TrainConfig, train: Train, monkeypatch: pytest.MonkeyPatch) -> Train:
    """`train_on(engine, folder, **changes)`: a short run with those settings that samples from such an engine."""
    short = replace(small_run, tasks=2, group_size=2, limits=Limits(max_turns=4, turn_tokens=32))

    def run(engine: type[LocalEngine], folder: Path, **changes: Any) -> None:
        async def opened(
            config: TrainConfig, model: Any, folder: Path, *, version: int, log_folder: Path
        ) -> LocalEngine:
            return engine(model, version=version)

        monkeypatch.setattr(parts_module, "open_engine", opened)
        train(replace(short, **changes), folder)

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        (Warm, "temperature: the engine's logprobs are those of temperature 1"),
        (Cut, "top-p or top-k: the engine's logprobs are never below"),
        (Foreign, "template or model: the engine reads other ids"),
        (Rounded, "dtype: the difference is the size of rounding"),
        (Deaf, "stale weights: a reply .* bears version 0"),
        (Lying, "template or model|dtype"),
    ],
)
def test_an_engine_that_samples_from_something_else_is_refused_with_the_cause(
    train_on: Train, engine: type[LocalEngine], cause: str, tmp_path: Path
) -> None:
    sampling = TrainSamplingConfig(temperature=0.6 if engine is Warm else 1.0)
    parity = ParityConfig(max_mismatch=1e-4)
    with pytest.raises(TrainingHalted, match=cause):
        train_on(engine, tmp_path / "run", sampling=sampling, parity=parity)


@pytest.mark.long
@pytest.mark.parametrize("engine", [Warm, Cut])
def test_the_start_is_refused_without_a_bound_too(train_on: Train, engine: type[LocalEngine], tmp_path: Path) -> None:
    with pytest.raises(TrainingHalted, match="Likely cause"):
        train_on(engine, tmp_path / "run", sampling=TrainSamplingConfig(temperature=0.6))
    assert not list((tmp_path / "run").glob("*.*")), "the folder is free for the next try"


@pytest.mark.long
def test_rounding_at_the_start_sets_the_bound(train_on: Train, tmp_path: Path) -> None:
    train_on(Rounded, tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_mismatch_is_found_before_the_weights_change(
    train_on: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("the optimizer stepped")

    async def blind(self: Any, version: int) -> Mismatch:
        return mismatch_of(0.0, 1)

    monkeypatch.setattr(run_module.ParityGate, "start", blind)
    monkeypatch.setattr("agentgym.trainers.learner.optimizer.PolicyOptimizer.step", never)
    with pytest.raises(TrainingHalted, match="over the bound of"):
        train_on(Cut, tmp_path / "run")


def test_a_mismatch_by_hand() -> None:
    logp, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -9.0])
    result = MismatchSums.of(logp, old, torch.tensor([True, True, False])).result
    assert (result.mean, result.max, result.num_tokens) == (0.25, 0.5, 2)
    assert result.kl == pytest.approx((math.exp(0.5) - 1 - 0.5) / 2)
    assert MismatchSums.of(logp[:0], old[:0], torch.zeros(0, dtype=torch.bool)).result.num_tokens == 0


@pytest.mark.parametrize("size", [1e-1, 1e-3, 3e-5, 1.9e-6, 1e-7, 2e-9])
def test_a_small_mismatch_has_the_divergence_and_the_quantile_of_its_size(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gap = size * torch.randn(20_000, generator=generator, dtype=torch.float64)
    logp = gap.float()  # minus 0, so that the gap is the number itself
    result = MismatchSums.of(logp, torch.zeros_like(logp), torch.ones(len(logp), dtype=torch.bool)).result
    exact = logp.double()
    assert result.kl > 0 and result.kl == pytest.approx(float((torch.expm1(exact) - exact).mean()), rel=1e-6)
    p99 = float(exact.abs().quantile(0.99))
    assert p99 * 0.999 <= result.p99 <= p99 * 2**0.5 < result.max


def test_a_mismatch_of_nothing_is_0() -> None:
    same = torch.linspace(-3, 0, 100)
    result = MismatchSums.of(same, same, torch.ones(100, dtype=torch.bool)).result
    assert (result.kl, result.p99, result.max, result.mean) == (0.0, 0.0, 0.0, 0.0)


def test_quantiles_are_of_the_tokens_that_count_whatever_parts_they_come_from() -> None:
    gap = torch.cat([torch.full((990,), 0.02), torch.full((10,), 3.0)])
    whole = MismatchSums.of(gap, torch.zeros(1000), torch.ones(1000, dtype=torch.bool))
    halves = [MismatchSums.of(part, torch.zeros(500), torch.ones(500, dtype=torch.bool)) for part in gap.split(500)]
    result = MismatchSums.of_scalars((halves[0] + halves[1]).scalars).result
    assert (result.over, result.max) == (whole.result.over, whole.result.max)
    assert 0.02 <= result.p99 < 0.03 and result.rms == pytest.approx((0.99 * 0.02**2 + 0.01) ** 0.5)
    assert result.square_deviation == pytest.approx(gap.clamp(max=1).square().std(correction=0).item())
    none = MismatchSums.of(gap, torch.zeros(1000), torch.zeros(1000, dtype=torch.bool)).result
    assert (none.num_tokens, none.p99, none.mean) == (0, 0.0, 0.0)


def mismatch_of(mean: float, num_tokens: int, tail: int = 0) -> Mismatch:
    """Returns the mismatch of tokens that differ by one number of nats, but for some that differ by 5."""
    gap = torch.cat([torch.full((num_tokens - tail,), mean), torch.full((tail,), 5.0)])
    return MismatchSums.of(gap, torch.zeros(num_tokens), torch.ones(num_tokens, dtype=torch.bool)).result


def test_a_mismatch_found_pickles_and_names_what_is_exceeded() -> None:
    for bound, message in (
        (MismatchBound(token=0.01), "5 nats on a token that was just sampled, over the bound of 0.01"),
        (MismatchBound(rms=0.1), "0.243 nats (root mean square), over the bound of 0.1"),
    ):
        mismatch = MismatchFound(mismatch_of(0.2, 10_000, tail=200), bound)
        again = copy.copy(mismatch)
        assert message in str(again) and (str(again), again.bound) == (str(mismatch), bound)


def test_few_tokens_must_be_further_over_a_bound_than_many() -> None:
    bound = MismatchBound(rms=0.06)
    assert bound.excess(mismatch_of(0.02, 20, tail=1)) is None, "one odd token of twenty says nothing"
    assert bound.excess(mismatch_of(0.02, 20_000, tail=1000)), "of twenty thousand, a thousand do"
    assert bound.excess(mismatch_of(0.01, 100_000, tail=300)) is None, "three in a thousand may"
    assert bound.excess(mismatch_of(0.07, 20)), "all alike are no accident"


@pytest.mark.parametrize(("start", "is_mixture", "rms"), [
    (0.0, False, 0.01), (0.02, False, 0.05), (0.08, False, 0.1), (0.08, True, 0.2),
])  # fmt: skip
def test_the_bound_of_a_rounded_type_follows_what_both_sides_differ_by(
    start: float, is_mixture: bool, rms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of("bfloat16", is_mixture=is_mixture)

    async def probe(name: str, version: int) -> Mismatch:
        return mismatch_of(start, 200)

    monkeypatch.setattr(gate, "probe", probe)
    asyncio.run(gate.start(0))
    assert gate.current_bound.rms == pytest.approx(rms) and gate.current_bound.token == math.inf
    for _ in range(4):
        gate.note(start)
    for _ in range(4):  # of nine, so the median is that of before
        gate.note(10.0)
    assert gate.current_bound.rms == pytest.approx(rms)


def test_a_bound_that_is_given_stays() -> None:
    gate = gate_of("bfloat16", ParityConfig(max_rms=0.3))
    gate.note(0.001)
    assert gate.current_bound == MismatchBound(rms=0.3)


def gate_of(dtype: Any, config: ParityConfig | None = None, **options: Any) -> ParityGate:
    part: Any = object()
    learner: Any = SimpleNamespace(config=LearnerConfig(dtype=dtype))
    parts: Any = SimpleNamespace(engine=part, learner=learner)
    return ParityGate(config or ParityConfig(), parts, part, part, **options)


def test_settings_that_probe_nothing_are_refused() -> None:
    for settings in ({"every": 0}, {"max_mismatch": 0.0}, {"max_rms": -1.0}):
        with pytest.raises(ConfigError):
            ParityConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_groups_that_go_on_over_updates_are_trained_with_their_own_versions(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = replace(small_run, steps=4, max_staleness=1, sampler=replace(small_run.sampler, concurrency=12))
    steps = train(config, tmp_path / "run")[1].steps
    assert [step.rollout.episodes for step in steps] == [12] * 4
    assert all(step.update is None or step.update.mismatch_max < 1e-3 for step in steps)


def test_a_probe_without_rounding_leaves_the_bound_at_that_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of("float32")

    async def probe(name: str, version: int) -> Mismatch:
        return mismatch_of(1e-6, 9)

    monkeypatch.setattr(gate, "probe", probe)
    asyncio.run(gate.start(0))
    assert gate.current_bound == MismatchBound(token=0.001)
