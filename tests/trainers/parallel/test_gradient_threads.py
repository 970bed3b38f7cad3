"""Gradients summed over threads: the same bits for any number of them, in the order of the parts."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from agentgym.model.decoder import Decoder
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.parallel import gradient_threads, learner_ranks
from agentgym.trainers.parallel.gradient_threads import GradientWorkers, MicroResult
from agentgym.trainers.parallel.learner_ranks import OneProcess
from agentgym.trainers.settings.optimizer import OptimizerConfig


def slope(weight: Tensor, factor: float) -> MicroResult[float]:
    """The loss `factor * weight`, whose gradient is `factor`."""
    return MicroResult((factor * weight).sum(), factor)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_gradients_add_up_and_reports_keep_the_order_of_the_parts(num_threads: int, is_large: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    workers = GradientWorkers(num_threads, is_large=is_large)

    def compute(factor: float) -> MicroResult[float]:
        time.sleep(0.02 if factor == 1.0 else 0.0)  # the first part is the last to be done
        return slope(weight, factor)

    assert workers.accumulate([1.0, 10.0, 100.0], compute, [weight]) == [1.0, 10.0, 100.0]
    assert weight.grad is not None and weight.grad.tolist() == [111.0, 111.0]
    workers.accumulate([1000.0], compute, [weight])
    assert weight.grad.tolist() == [1111.0, 1111.0], "gradients that are there already are added to"
    workers.close()


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_sums_are_taken_in_the_order_of_the_parts_whichever_is_done_first(num_threads: int, is_large: bool) -> None:
    # In float32 (1e8 + 1) - 1e8 is 0, while (1e8 - 1e8) + 1 is 1: the order shows.
    weight = nn.Parameter(torch.ones(1))
    workers = GradientWorkers(num_threads, is_large=is_large)

    def compute(factor: float) -> MicroResult[float]:
        time.sleep(0.02 if factor == 1e8 else 0.0)
        return slope(weight, factor)

    workers.accumulate([1e8, 1.0, -1e8], compute, [weight])
    workers.close()
    assert weight.grad is not None and weight.grad.tolist() == [0.0]


def test_gradients_of_few_parts_wait_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_threads, "PENDING_BYTES", 12)
    weight = nn.Parameter(torch.ones(1))
    workers, begun = GradientWorkers(2), []

    def compute(factor: float) -> MicroResult[float]:
        begun.append(factor)
        if factor == 0.0:
            time.sleep(0.2)
            assert begun[1:] == [1.0, 2.0], "three gradients of four bytes"
        return slope(weight, factor)

    assert workers.accumulate([float(part) for part in range(9)], compute, [weight]) == [*range(9)]
    workers.close()
    assert weight.grad is not None and weight.grad.tolist() == [36.0]


class Tracked(torch.autograd.Function):
    """`sum(weight)`, which counts the gradients that are in memory beside the sum as it makes another one."""

    made: list[weakref.ref[Tensor]]
    weights: list[nn.Parameter]
    most: int

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        gradient = grads[0].expand(1000).clone()
        Tracked.made.append(weakref.ref(gradient))
        alive = [own for reference in Tracked.made if (own := reference()) is not None]
        sums = {weight.grad.data_ptr() for weight in Tracked.weights if weight.grad is not None}
        Tracked.most = max(Tracked.most, sum(own.data_ptr() not in sums for own in alive))
        return gradient


@pytest.mark.parametrize(("is_large", "most"), [(True, 1), (False, 3)])
def test_a_large_model_has_the_gradient_of_one_tensor_beside_the_sum(
    is_large: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_threads, "PENDING_BYTES", 0)
    Tracked.made, Tracked.most = [], 0
    Tracked.weights = weights = [nn.Parameter(torch.ones(1000)) for _ in range(3)]
    workers = GradientWorkers(1, is_large=is_large)

    def compute(part: int) -> MicroResult[int]:
        return MicroResult(torch.stack([Tracked.apply(weight) for weight in weights]).sum(), part)  # type: ignore[no-untyped-call]

    workers.accumulate([0, 1, 2, 3], compute, weights)
    workers.close()
    assert Tracked.most == most
    assert all(weight.grad is not None and weight.grad.eq(4.0).all() for weight in weights)


def test_a_part_of_a_large_model_has_all_threads_and_other_work_has_one_core() -> None:
    workers = GradientWorkers(3, is_large=True)
    assert workers.map(lambda _: torch.get_num_threads(), range(4)) == [3] * 4
    assert workers.run(torch.get_num_threads) == 1
    assert workers.map(lambda _: torch.get_num_threads(), range(1)) == [3], "as before"
    workers.close()


@pytest.mark.parametrize("is_large", [False, True])
def test_portions_are_summed_apart_and_then_together(is_large: bool) -> None:
    # One after the other 1e8 takes in both ones, and -1e8 leaves 0; apart, the second portion keeps its one.
    weight = nn.Parameter(torch.ones(1))
    workers = GradientWorkers(2, is_large=is_large)
    parts = [1e8, -1e8, 1.0, 1e8, -1e8]
    reports = workers.accumulate(parts, lambda factor: slope(weight, factor), [weight], sizes=[3, 2])
    assert reports == parts
    assert weight.grad is not None and weight.grad.tolist() == [1.0]
    weight.grad = None
    workers.accumulate([1.0, 1e8, 1.0, -1e8], lambda factor: slope(weight, factor), [weight], sizes=[1, 3])
    workers.close()
    assert weight.grad is not None and weight.grad.tolist() == [1.0]


@pytest.mark.parametrize("is_large", [False, True])
def test_a_parameter_that_no_part_uses_keeps_no_gradient(is_large: bool) -> None:
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    workers = GradientWorkers(1, is_large=is_large)
    workers.accumulate([2.0], lambda factor: slope(used, factor), [used, unused])
    workers.close()
    assert unused.grad is None


def test_other_work_runs_on_one_core_and_returns_its_value_or_error() -> None:
    workers = GradientWorkers(2)
    name, num_threads = workers.run(lambda: (threading.current_thread().name, torch.get_num_threads()))
    assert name.startswith("agentgym-learner") and num_threads == 1
    with pytest.raises(ZeroDivisionError):
        workers.run(lambda: 1 // 0)
    workers.close()


def test_an_error_in_a_part_reaches_the_caller_and_close_ends_the_threads() -> None:
    others = {*threading.enumerate()}
    workers = GradientWorkers(2)

    def fail(part: int) -> MicroResult[int]:
        raise ArithmeticError(f"part {part}")

    with pytest.raises(ArithmeticError, match="part 0"):
        workers.accumulate([0, 1], fail, [])
    workers.close()
    own = {*threading.enumerate()} - others
    assert not [thread for thread in own if thread.name.startswith("agentgym-learner")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_model_has_the_gradient_of_a_small_one(
    dtype: torch.dtype,
    tiny: Callable[..., Decoder],
    fresh_batch: Callable[..., TrainingBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, weights = fresh_batch(tiny()), []
    for smallest in (1 << 30, 1):
        monkeypatch.setattr(learner_ranks, "LARGE_MODEL", smallest)
        model = tiny().to(dtype)
        config = LearnerConfig(micro_batch_tokens=24, threads=1)
        learner = Learner(model, config, OptimizerConfig(learning_rate=1e-2, warmup_steps=1), total_steps=10)
        learner.update(batch)
        learner.close()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*weights, strict=True))


@pytest.mark.parametrize(("shared", "tokens"), [(0, 32), (60, 400)])
def test_a_pass_of_a_large_model_is_short_unless_prefixes_would_be_computed_again(
    shared: int,
    tokens: int,
    tiny: Callable[..., Decoder],
    fresh_batch: Callable[..., TrainingBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner_ranks, "SPARING_TOKENS", (32, 64))
    model = tiny()
    batch = fresh_batch(model, shared=shared)

    def parts(smallest: int, *, saves_memory: bool = True) -> list[tuple[int, ...]]:
        monkeypatch.setattr(learner_ranks, "LARGE_MODEL", smallest)
        ranks = OneProcess(torch.device("cpu"), 1, model=model, saves_memory=saves_memory)
        ranks.close()
        return [part.seqlens for part in ranks.share(batch, 400).parts]

    whole = [part.seqlens for part in batch.split(400)]
    assert parts(1) == [part.seqlens for part in batch.split(tokens)]
    assert parts(1, saves_memory=False) == whole, "what is set"
    assert parts(1 << 30) == whole


@pytest.mark.long
def test_a_step_of_a_real_model_has_the_same_bits_with_any_number_of_threads(
    tiny: Callable[..., Decoder], fresh_batch: Callable[..., TrainingBatch]
) -> None:
    weights, norms = [], []
    for num_threads in (1, 2, 3, 8):
        model = tiny()
        config = LearnerConfig(micro_batch_tokens=24, threads=num_threads)
        learner = Learner(model, config, OptimizerConfig(learning_rate=1e-2, warmup_steps=1), total_steps=10)
        for step in range(2):
            norms.append(learner.update(fresh_batch(model, seed=step)).grad_norm)
        learner.close()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for some_weights in weights[1:]:
        assert all(torch.equal(left, right) for left, right in zip(weights[0], some_weights, strict=True))
    assert norms[:2] * 4 == norms


def test_a_gradient_that_is_a_part_of_another_one_is_stepped_on_as_it_is() -> None:
    """A fused optimizer reads it as contiguous memory."""
    weights = [nn.Parameter(torch.zeros(2, 3)) for _ in range(2)]
    slopes = torch.tensor([[1.0, -1.0, 1.0, -1.0, -1.0, 1.0], [-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]])
    workers = GradientWorkers(1)
    workers.accumulate([1.0], lambda _: MicroResult((torch.cat(weights, 1) * slopes).sum(), 1.0), weights)
    torch.optim.AdamW(weights, lr=1.0, weight_decay=0.0, fused=True).step()
    torch.testing.assert_close(torch.cat(weights, 1).detach(), -slopes)
    workers.close()
