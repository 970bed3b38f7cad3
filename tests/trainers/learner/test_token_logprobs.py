"""Logprobs, entropies and their gradients against log_softmax and finite differences, chunk by chunk.

Shapes: `N` tokens, `E` model width, `V` vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentgym.trainers.learner import token_logprobs
from agentgym.trainers.learner.token_logprobs import score_targets


def plain(hidden_NE: Tensor, head_VE: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The definition: log_softmax over whole logits."""
    logp_NV = (hidden_NE @ head_VE.T / temperature).log_softmax(-1)
    return logp_NV.gather(1, target_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def drawn(num_tokens: int, vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_NE = torch.randn(num_tokens, 8, generator=generator)
    head_VE = torch.randn(vocab_size, 8, generator=generator)
    return hidden_NE, head_VE, torch.randint(0, vocab_size, (num_tokens,), generator=generator)


def test_a_distribution_worked_by_hand() -> None:
    # Logits (0, ln 3): probabilities 1/4 and 3/4. At temperature 1/2 they are (0, 2 ln 3): 1/10 and 9/10.
    hidden_NE, head_VE = torch.tensor([[math.log(3.0)]]), torch.tensor([[0.0], [1.0]])
    scores = score_targets(hidden_NE, head_VE, torch.tensor([1]))
    assert scores.logp_N.item() == pytest.approx(math.log(0.75), rel=1e-6)
    assert scores.entropy_N.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), rel=1e-6)
    sharp = score_targets(hidden_NE, head_VE, torch.tensor([0]), temperature=0.5)
    assert sharp.logp_N.item() == pytest.approx(math.log(0.1), rel=1e-6)


def test_temperature_zero_counts_as_one() -> None:
    hidden_NE, head_VE, target_N = drawn(5, 11)
    assert torch.equal(
        score_targets(hidden_NE, head_VE, target_N, 0.0).logp_N, score_targets(hidden_NE, head_VE, target_N).logp_N
    )


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(0, 20),
    vocab_size=st.integers(2, 30),
    chunk_logits=st.integers(1, 200),
    temperature=st.sampled_from([0.6, 1.0, 1.3]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_log_softmax_whatever_the_chunks(
    num_tokens: int, vocab_size: int, chunk_logits: int, temperature: float, seed: int
) -> None:
    inputs = drawn(num_tokens, vocab_size, seed)
    share_N = torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed + 1))
    ours, theirs = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_logprobs, "CHUNK_LOGITS", chunk_logits)
        patch.setattr(token_logprobs, "MAX_ROWS", 1)
        for results, compute in ((ours, score_targets), (theirs, plain)):
            hidden_NE, head_VE = (tensor.clone().requires_grad_() for tensor in inputs[:2])
            scores = compute(hidden_NE, head_VE, inputs[2], temperature)
            logp_N, entropy_N = scores if isinstance(scores, tuple) else (scores.logp_N, scores.entropy_N)
            gradients = torch.autograd.grad((share_N * (logp_N + 0.3 * entropy_N)).sum(), (hidden_NE, head_VE))
            results += [logp_N.detach(), entropy_N.detach(), *gradients]
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "with entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_agree_with_finite_differences(temperature: float, with_entropy: bool) -> None:
    # The scores are fp32, so differences of 1e-2 in the inputs, which are exact to 1e-4 for functions this smooth.
    hidden_NE, head_VE, target_N = drawn(3, 7)

    def value() -> float:
        scores = score_targets(hidden_NE, head_VE, target_N, temperature)
        return float((scores.logp_N + (0.5 * scores.entropy_N if with_entropy else 0.0)).double().sum())

    leaf_NE, leaf_VE = hidden_NE.clone().requires_grad_(), head_VE.clone().requires_grad_()
    scores = score_targets(leaf_NE, leaf_VE, target_N, temperature)
    total = (scores.logp_N + (0.5 * scores.entropy_N if with_entropy else 0.0)).sum()
    gradients = torch.autograd.grad(total, (leaf_NE, leaf_VE))
    for tensor, gradient in zip((hidden_NE, head_VE), gradients, strict=True):
        for place in [(0, 0), (1, 5), (2, 3)]:
            before, step = tensor[place].item(), 1e-2
            tensor[place] = before + step
            above = value()
            tensor[place] = before - step
            below = value()
            tensor[place] = before
            assert gradient[place].item() == pytest.approx((above - below) / (2 * step), rel=2e-3, abs=2e-3)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else [result]
        self.numel = max([self.numel, *(tensor.numel() for tensor in outputs if isinstance(tensor, Tensor))])
        return result


def test_the_logits_of_all_tokens_are_never_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, vocab_size = 64, 500
    monkeypatch.setattr(token_logprobs, "MAX_ROWS", 1)
    monkeypatch.setattr(token_logprobs, "CHUNK_LOGITS", 4 * vocab_size)
    hidden_NE, head_VE, target_N = drawn(num_tokens, vocab_size)
    hidden_NE.requires_grad_()
    head_VE.requires_grad_()
    with _Largest() as seen:
        scores = score_targets(hidden_NE, head_VE, target_N)
        (scores.logp_N + scores.entropy_N).sum().backward()
    assert hidden_NE.grad is not None
    assert seen.numel == 8 * vocab_size, "the head's gradient is the largest tensor; a chunk has 4 x 500"
    assert seen.numel < num_tokens * vocab_size


def test_a_vocabulary_beyond_the_chunk_still_takes_one_token_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_logprobs, "MAX_ROWS", 1)
    monkeypatch.setattr(token_logprobs, "CHUNK_LOGITS", 3)
    hidden_NE, head_VE, target_N = drawn(4, 9)
    torch.testing.assert_close(
        score_targets(hidden_NE, head_VE, target_N).logp_N, plain(hidden_NE, head_VE, target_N, 1.0)[0]
    )


def test_bfloat16_inputs_are_scored_in_float32() -> None:
    hidden_NE, head_VE, target_N = drawn(6, 12)
    half_NE, half_VE = hidden_NE.bfloat16().requires_grad_(), head_VE.bfloat16()
    scores = score_targets(half_NE, half_VE, target_N)
    assert scores.logp_N.dtype == scores.entropy_N.dtype == torch.float32
    scores.logp_N.sum().backward()
    assert half_NE.grad is not None and half_NE.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite() -> None:
    hidden_NE, head_VE = torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [-1.0], [0.0]])
    hidden_NE.requires_grad_()
    scores = score_targets(hidden_NE, head_VE, torch.tensor([0, 0]))
    assert scores.logp_N.tolist() == [0.0, -2e4]
    assert scores.entropy_N.tolist() == [0.0, 0.0]
    (scores.logp_N + scores.entropy_N).sum().backward()
    assert hidden_NE.grad is not None and bool(hidden_NE.grad.isfinite().all())


def test_a_probability_of_zero_leaves_the_gradient_of_the_entropy_finite() -> None:
    hidden_NE = torch.tensor([[1.0, 0.0]], requires_grad=True)
    head_VE = torch.tensor(
        [[300.0, 0.0], [299.0, 1.0], [-300.0, 0.0]], requires_grad=True
    )  # the last has probability 0
    scores = score_targets(hidden_NE, head_VE, torch.tensor([0]))
    gradients = torch.autograd.grad(5.0 * scores.entropy_N.sum(), (hidden_NE, head_VE))
    double_NE, double_VE = (tensor.detach().double().requires_grad_() for tensor in (hidden_NE, head_VE))
    log_p_NV = (double_NE @ double_VE.T).log_softmax(-1)
    expected = torch.autograd.grad(-5.0 * (log_p_NV.exp() * log_p_NV).sum(), (double_NE, double_VE))
    for left, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=1e-3, atol=1e-4)


def test_a_large_vocabulary_has_the_gradients_of_log_softmax() -> None:
    hidden_NE, head_VE, target_N = drawn(5, token_logprobs.LARGE_VOCABULARY + 100)
    ours, theirs = [], []
    for score, grads in ((score_targets, ours), (None, theirs)):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden_NE, head_VE)]
        logp_N = plain(*inputs, target_N, 0.7)[0] if score is None else score(*inputs, target_N, 0.7).logp_N
        logp_N.sum().backward()
        grads += [tensor.grad for tensor in inputs]
    for mine, plainly in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plainly, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_bfloat16_head_is_summed_over_chunks_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, vocab_size = 1024, 3
    monkeypatch.setattr(token_logprobs, "MAX_ROWS", 1)
    monkeypatch.setattr(token_logprobs, "CHUNK_LOGITS", vocab_size)  # a chunk for each token
    hidden_NE, head_VE = torch.ones(num_tokens, 2).bfloat16(), torch.zeros(vocab_size, 2).bfloat16().requires_grad_()
    score_targets(hidden_NE, head_VE, torch.zeros(num_tokens, dtype=torch.int64)).logp_N.sum().backward()
    # Every token adds 2/3 to the first word and takes 1/3 off the others; a bfloat16 sum would stop at 256 times that.
    expected = torch.tensor([[2.0, 2.0], [-1.0, -1.0], [-1.0, -1.0]]) * num_tokens / 3
    assert head_VE.grad is not None
    torch.testing.assert_close(head_VE.grad.float(), expected, rtol=1e-2, atol=0.0)
