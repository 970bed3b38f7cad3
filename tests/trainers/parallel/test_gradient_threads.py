"""Gradients summed over threads: the same bits for any number of them, in the order of the parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from agentgym.model.decoder import Decoder
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.parallel import gradient_threads
from agentgym.trainers.parallel.gradient_threads import GradientWorkers, MicroResult
from agentgym.trainers.settings.optimizer import OptimizerConfig


def slope(weight: Tensor, factor: float) -> MicroResult[float]:
    """The loss `factor * weight`, whose gradient is `factor`."""
    return MicroResult((factor * weight).sum(), factor)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_gradients_add_up_and_reports_keep_the_order_of_the_parts(num_threads: int) -> None:
    weight = nn.Parameter(torch.ones(2))
    workers = GradientWorkers(num_threads)

    def compute(factor: float) -> MicroResult[float]:
        time.sleep(0.02 if factor == 1.0 else 0.0)  # the first part is the last to be done
        return slope(weight, factor)

    assert workers.accumulate([1.0, 10.0, 100.0], compute, [weight]) == [1.0, 10.0, 100.0]
    assert weight.grad is not None and weight.grad.tolist() == [111.0, 111.0]
    workers.accumulate([1000.0], compute, [weight])
    assert weight.grad.tolist() == [1111.0, 1111.0], "gradients that are there already are added to"
    workers.close()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_sums_are_taken_in_the_order_of_the_parts_whichever_is_done_first(num_threads: int) -> None:
    # In float32 (1e8 + 1) - 1e8 is 0, while (1e8 - 1e8) + 1 is 1: the order shows.
    weight = nn.Parameter(torch.ones(1))
    workers = GradientWorkers(num_threads)

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


def test_portions_are_summed_apart_and_then_together() -> None:
    # One after the other 1e8 takes in both ones, and -1e8 leaves 0; apart, the second portion keeps its one.
    weight = nn.Parameter(torch.ones(1))
    workers = GradientWorkers(2)
    parts = [1e8, -1e8, 1.0, 1e8, -1e8]
    reports = workers.accumulate(parts, lambda factor: slope(weight, factor), [weight], sizes=[3, 2])
    assert reports == parts
    assert weight.grad is not None and weight.grad.tolist() == [1.0]
    weight.grad = None
    workers.accumulate([1.0, 1e8, 1.0, -1e8], lambda factor: slope(weight, factor), [weight], sizes=[1, 3])
    workers.close()
    assert weight.grad is not None and weight.grad.tolist() == [1.0]


def test_a_parameter_that_no_part_uses_keeps_no_gradient() -> None:
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    workers = GradientWorkers(1)
    workers.accumulate([2.0], lambda factor: slope(used, factor), [used, unused])
    assert unused.grad is None


def test_other_work_runs_on_one_core_and_returns_its_value_or_error() -> None:
    workers = GradientWorkers(2)
    name, num_threads = workers.run(lambda: (threading.current_thread().name, torch.get_num_threads()))
    assert name.startswith("agentgym-learner") and num_threads == 1
    with pytest.raises(ZeroDivisionError):
        workers.run(lambda: 1 // 0)
    workers.close()


def test_an_error_in_a_part_reaches_the_caller_and_close_ends_the_threads() -> None:
    workers = GradientWorkers(2)

    def fail(part: int) -> MicroResult[int]:
        raise ArithmeticError(f"part {part}")

    with pytest.raises(ArithmeticError, match="part 0"):
        workers.accumulate([0, 1], fail, [])
    workers.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("agentgym-learner")]


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
