"""Every policy loss against plain loops over floats, its gradient by finite differences, and what all of them keep to.

A reference takes the logprobs twice: `moving` is what the gradient runs through, `frozen` what the paper stops it at.

Shapes: `B` row, `T` token, `N` packed tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.trainers.algorithms.losses import LOSSES, is_elementwise, is_silent_at_zero, loss_with, traits, traits_of

Floats = list[float]
ALL = sorted(name for name in LOSSES if not traits_of(LOSSES[name]).against_reference)
ELEMENTWISE = ["cispo", "dppo_kl", "dppo_tv", "dro", "gpg", "ppo_clip", "reinforce", "sapo"]
SEQUENCE = ["geo_mean", "gspo"]
HUGE = st.lists(st.sampled_from([-1000.0, 0.0, 1000.0]), min_size=1, max_size=5)


@dataclass(frozen=True)
class Case:
    """Trained tokens of some sequences, as floats, in order."""

    old: Floats
    gain: Floats
    sequence: list[int]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo_clip(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    losses = []
    for logp, old, gain in zip(moving, case.old, case.gain, strict=True):
        ratio = math.exp(logp - old)
        objective = min(ratio * gain, clip(ratio, 1 - s["clip_low"], 1 + s["clip_high"]) * gain)
        losses.append(-max(objective, s["dual_clip"] * gain) if gain < 0 else -objective)
    return losses


def gpg(moving: Floats, frozen: Floats, case: Case) -> Floats:
    return [-gain * logp for logp, gain in zip(moving, case.gain, strict=True)]


def reinforce(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    weights = [min(math.exp(logp - old), s["max_ratio"]) for logp, old in zip(frozen, case.old, strict=True)]
    return [-w * gain * logp for w, logp, gain in zip(weights, moving, case.gain, strict=True)]


def cispo(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    ratios = [math.exp(logp - old) for logp, old in zip(frozen, case.old, strict=True)]
    weights = [clip(ratio, 1 - s["clip_low"], 1 + s["clip_high"]) for ratio in ratios]
    return [-w * gain * logp for w, logp, gain in zip(weights, moving, case.gain, strict=True)]


def dppo_tv(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    losses = []
    for logp, at, old, gain in zip(moving, frozen, case.old, case.gain, strict=True):
        gap = math.exp(at) - math.exp(old)
        cut = gap > s["clip_high"] if gain > 0 else gap < -s["clip_low"]
        losses.append(0.0 if cut else -min(math.exp(at - old), s["max_ratio"]) * gain * logp)
    return losses


def dppo_kl(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    losses = []
    for logp, at, old, gain in zip(moving, frozen, case.old, case.gain, strict=True):
        p, q = math.exp(at), math.exp(old)
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        cut = (p > q and divergence > s["clip_high"]) if gain > 0 else (p < q and divergence > s["clip_low"])
        losses.append(0.0 if cut else -min(p / q, s["max_ratio"]) * gain * logp)
    return losses


def sapo(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    losses = []
    for logp, old, gain in zip(moving, case.old, case.gain, strict=True):
        tau = s["tau_positive"] if gain > 0 else s["tau_negative"]
        gate = 4 / tau / (1 + math.exp(-tau * (math.exp(logp - old) - 1)))
        losses.append(-gate * gain)
    return losses


def dro(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    rows = zip(moving, case.old, case.gain, strict=True)
    return [-(gain * logp - s["beta"] / 2 * (logp - old) ** 2) for logp, old, gain in rows]


def members(case: Case) -> dict[int, list[int]]:
    """The places of each sequence's tokens."""
    return {name: [i for i, own in enumerate(case.sequence) if own == name] for name in set(case.sequence)}


def gspo(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    losses = [0.0] * len(moving)
    for places in members(case).values():
        mean = sum(frozen[i] - case.old[i] for i in places) / len(places)
        for i in places:
            ratio = math.exp(mean) * math.exp(moving[i] - frozen[i])
            bounded = clip(ratio, 1 - s["clip_low"], 1 + s["clip_high"])
            losses[i] = -min(ratio * case.gain[i], bounded * case.gain[i])
    return losses


def geo_mean(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    losses = [0.0] * len(moving)
    for places in members(case).values():
        product, total = 1.0, 0.0
        for i in places:
            ratio = math.exp(moving[i] - case.old[i])
            bounded = clip(ratio, math.exp(-s["clip_low"]), math.exp(s["clip_high"]))
            product *= min(ratio, bounded) if case.gain[i] > 0 else max(ratio, bounded)
            total += case.gain[i]
        for i in places:
            losses[i] = -(total / len(places)) * product ** (1 / len(places))
    return losses


def covariances(logps: Floats, case: Case) -> Floats:
    mean_gain, mean_logp = sum(case.gain) / len(case.gain), sum(logps) / len(logps)
    return [(gain - mean_gain) * (logp - mean_logp) for gain, logp in zip(case.gain, logps, strict=True)]


def kl_cov(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    ranked = sorted(range(len(frozen)), key=lambda i: -covariances(frozen, case)[i])
    penalized = ranked[: max(1, int(s["fraction"] * len(frozen)))]
    return [
        -math.exp(logp - old) * gain + (s["kl_coefficient"] * abs(logp - old) if i in penalized else 0.0)
        for i, (logp, old, gain) in enumerate(zip(moving, case.old, case.gain, strict=True))
    ]


def clip_cov(moving: Floats, frozen: Floats, case: Case, **s: float) -> Floats:
    """With so large a share that the choice is no longer random: all candidates are dropped."""
    losses = ppo_clip(moving, frozen, case, clip_low=s["clip_low"], clip_high=s["clip_high"], dual_clip=1e9)
    for i, covariance in enumerate(covariances(frozen, case)):
        ratio = math.exp(frozen[i] - case.old[i])
        over = ratio > 1 + s["clip_high"] if case.gain[i] > 0 else ratio < 1 - s["clip_low"]
        if not over and s["cov_low"] < covariance < s["cov_high"]:
            losses[i] = 0.0
    return losses


REFERENCES: list[tuple[Callable[..., Floats], dict[str, float]]] = [
    (ppo_clip, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}),
    (gpg, {}),
    (reinforce, {"max_ratio": 1.1}),
    (cispo, {"clip_low": 1.0, "clip_high": 0.2}),
    (cispo, {"clip_low": 0.2, "clip_high": 0.3}),
    (dppo_tv, {"clip_low": 0.05, "clip_high": 0.08, "max_ratio": 1.4}),
    (dppo_kl, {"clip_low": 0.01, "clip_high": 0.02, "max_ratio": 1.4}),
    (sapo, {"tau_positive": 1.0, "tau_negative": 1.05}),
    (sapo, {"tau_positive": 3.0, "tau_negative": 5.0}),
    (dro, {"beta": 0.7}),
    (gspo, {"clip_low": 3e-4, "clip_high": 4e-4}),
    (gspo, {"clip_low": 0.2, "clip_high": 0.3}),
    (geo_mean, {"clip_low": 0.4, "clip_high": 0.4}),
    (geo_mean, {"clip_low": 0.1, "clip_high": 0.2}),
    (kl_cov, {"fraction": 0.3, "kl_coefficient": 0.5}),
    (clip_cov, {"clip_low": 0.2, "clip_high": 0.3, "fraction": 1.0, "cov_low": 0.1, "cov_high": 0.8}),
]
CASES = [pytest.param(*pair, id=f"{pair[0].__name__}-{index}") for index, pair in enumerate(REFERENCES)]


@dataclass(frozen=True)
class Batch:
    """Padded tensors, with numbers outside of the mask that would break whatever reads them."""

    logp_BT: Tensor
    old_BT: Tensor
    gain_BT: Tensor
    mask_BT: Tensor

    @property
    def case(self) -> Case:
        rows_BT = torch.arange(len(self.mask_BT))[:, None].expand(self.mask_BT.shape)
        mask_BT = self.mask_BT
        return Case(self.old_BT[mask_BT].tolist(), self.gain_BT[mask_BT].tolist(), rows_BT[mask_BT].tolist())


def drawn(seed: int, *, spread: float = 0.5, per_row: bool = False, dtype: torch.dtype = torch.float64) -> Batch:
    """Five rows of seven tokens, one of them without a trained token; advantages per token, or one a row."""
    generator = torch.Generator().manual_seed(seed)
    shape = (5, 7)
    old_BT = -3 * torch.rand(shape, generator=generator, dtype=dtype) - 0.3
    logp_BT = (old_BT + spread * torch.randn(shape, generator=generator, dtype=dtype)).clamp(max=-0.01)
    gain_BT = torch.randn((5, 1) if per_row else shape, generator=generator, dtype=dtype).expand(shape)
    mask_BT = torch.rand(shape, generator=generator) < 0.6
    mask_BT[2] = False
    nan = torch.tensor(math.nan, dtype=dtype)
    logp_BT, old_BT, gain_BT = (torch.where(mask_BT, tensor_BT, nan) for tensor_BT in (logp_BT, old_BT, gain_BT))
    return Batch(logp_BT, old_BT, gain_BT, mask_BT)


def sequences_of(batch: Batch) -> Tensor:
    return torch.arange(len(batch.mask_BT))[:, None].expand(batch.mask_BT.shape).contiguous()


def run(name: str, batch: Batch, **settings: float) -> tuple[Tensor, Tensor]:
    """The loss and its gradient under weights that differ from token to token."""
    logp_BT = batch.logp_BT.clone().requires_grad_()
    result = LOSSES[name](logp_BT, batch.old_BT, batch.gain_BT, batch.mask_BT, **settings)
    weight_BT = torch.linspace(0.5, 2.0, logp_BT.numel(), dtype=torch.float64).reshape(logp_BT.shape)
    (slope_BT,) = torch.autograd.grad((weight_BT * result.loss).sum(), logp_BT)
    return result.loss.detach(), slope_BT


@pytest.mark.parametrize(("reference", "settings"), CASES)
@pytest.mark.parametrize("per_row", [False, True], ids=["advantage per token", "advantage per row"])
@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_that_of_plain_loops(
    reference: Callable[..., Floats], settings: dict[str, float], per_row: bool, seed: int
) -> None:
    batch = drawn(seed, per_row=per_row)
    loss_BT, _ = run(reference.__name__, batch, **settings)
    logps = batch.logp_BT[batch.mask_BT].tolist()
    assert loss_BT[batch.mask_BT].tolist() == pytest.approx(reference(logps, logps, batch.case, **settings), abs=1e-7)


@pytest.mark.parametrize(("reference", "settings"), CASES)
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_is_that_of_finite_differences(
    reference: Callable[..., Floats], settings: dict[str, float], seed: int
) -> None:
    batch, step = drawn(seed), 1e-6
    _, slope_BT = run(reference.__name__, batch, **settings)
    logps = batch.logp_BT[batch.mask_BT].tolist()
    weights = torch.linspace(0.5, 2.0, batch.mask_BT.numel(), dtype=torch.float64).reshape(batch.mask_BT.shape)
    weights = weights[batch.mask_BT].tolist()

    def total(moving: Floats) -> float:
        losses = reference(moving, logps, batch.case, **settings)
        return math.fsum(w * loss for w, loss in zip(weights, losses, strict=True))

    slopes = []
    for i in range(len(logps)):
        up, down = ([*logps[:i], logps[i] + sign * step, *logps[i + 1 :]] for sign in (1, -1))
        slopes.append((total(up) - total(down)) / (2 * step))
    assert slope_BT[batch.mask_BT].tolist() == pytest.approx(slopes, abs=1e-6)


def test_every_loss_has_a_reference() -> None:
    assert sorted({reference.__name__ for reference, _ in REFERENCES}) == ALL


def test_the_cases_reach_what_is_clipped_and_what_is_not() -> None:
    for name, settings in ((reference.__name__, settings) for reference, settings in REFERENCES):
        if name in ("gpg", "dro", "sapo"):
            continue
        batches = [drawn(seed) for seed in range(4)]
        stats = [LOSSES[name](b.logp_BT, b.old_BT, b.gain_BT, b.mask_BT, **settings).stats for b in batches]
        assert 0 < sum(numbers.clip_fraction for numbers in stats) < 4, name


@pytest.mark.parametrize("name", ALL)
def test_outside_of_the_mask_loss_and_gradient_are_exactly_zero(name: str) -> None:
    batch = drawn(1)
    loss_BT, slope_BT = run(name, batch)
    assert not loss_BT[~batch.mask_BT].any() and not slope_BT[~batch.mask_BT].any()
    assert loss_BT.isfinite().all() and slope_BT.isfinite().all()
    assert loss_BT[batch.mask_BT].any()


@pytest.mark.parametrize("name", ALL)
def test_a_random_mask_equals_the_compacted_sequence(name: str) -> None:
    batch = drawn(2)
    loss_BT, slope_BT = run(name, batch)
    mask_BT = batch.mask_BT
    logp_N = batch.logp_BT[mask_BT].requires_grad_()
    sequences_N = sequences_of(batch)[mask_BT]
    packed = LOSSES[name](
        logp_N, batch.old_BT[mask_BT], batch.gain_BT[mask_BT], mask_BT[mask_BT], sequences=sequences_N
    )
    torch.testing.assert_close(packed.loss.detach(), loss_BT[mask_BT], rtol=0, atol=1e-12)
    weight_N = torch.linspace(0.5, 2.0, mask_BT.numel(), dtype=torch.float64).reshape(mask_BT.shape)[mask_BT]
    (slope_N,) = torch.autograd.grad((weight_N * packed.loss).sum(), logp_N)
    torch.testing.assert_close(slope_N, slope_BT[mask_BT], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_parts_of_a_step_add_up_to_the_whole(name: str, cut: int) -> None:
    batch = drawn(3)
    tensors = (batch.logp_BT, batch.old_BT, batch.gain_BT, batch.mask_BT)
    whole = LOSSES[name](*tensors)
    parts = [LOSSES[name](*(tensor[part] for tensor in tensors)) for part in (slice(0, cut), slice(cut, 5))]
    torch.testing.assert_close(torch.cat([part.loss for part in parts]), whole.loss, rtol=0, atol=1e-12)
    total = parts[0].stats + parts[1].stats
    for field in ("num_tokens", "clipped", "dual_clipped", "ratio_sum", "ratio_max", "kl_sum"):
        torch.testing.assert_close(getattr(total, field), getattr(whole.stats, field), rtol=0, atol=1e-12)


def test_the_traits_list_the_elementwise_losses() -> None:
    assert [name for name in ALL if is_elementwise(LOSSES[name])] == ELEMENTWISE
    assert not is_elementwise(lambda *_: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("name", [name for name in ALL if name not in ELEMENTWISE])
def test_what_is_not_elementwise_does_depend_on_other_tokens(name: str) -> None:
    batch, settings = drawn(3), {"clip_cov": {"cov_low": 0.0, "fraction": 1.0}}.get(name, {})
    tensors = (batch.logp_BT, batch.old_BT, batch.gain_BT, batch.mask_BT)
    whole = LOSSES[name](*tensors, **settings).loss
    alone = [LOSSES[name](*(tensor[:, t : t + 1] for tensor in tensors), **settings).loss for t in range(7)]
    assert not torch.allclose(torch.cat(alone, 1), whole)


@pytest.mark.parametrize("name", ALL)
def test_a_trajectory_without_advantage_has_no_gradient_if_the_traits_promise_it(name: str) -> None:
    settings = {"kl_cov": {"fraction": 1.0}, "clip_cov": {"fraction": 1.0, "cov_low": 0.0}}.get(name, {})

    def silent(seed: int) -> bool:
        batch = drawn(seed, per_row=True)
        gain_BT = batch.gain_BT.clone()
        gain_BT[:2] = 0.0
        logp_BT = batch.logp_BT.clone().requires_grad_()
        whole = LOSSES[name](logp_BT, batch.old_BT, gain_BT, batch.mask_BT, **settings).loss
        (slope_BT,) = torch.autograd.grad(whole.sum(), logp_BT)
        rest = LOSSES[name](logp_BT[2:], batch.old_BT[2:], gain_BT[2:], batch.mask_BT[2:], **settings).loss
        return not slope_BT[:2].any() and torch.allclose(rest, whole[2:], rtol=0, atol=1e-12)

    assert all(silent(seed) for seed in range(20)) == is_silent_at_zero(LOSSES[name])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_type_of_the_logprobs_is_that_of_the_loss(name: str, dtype: torch.dtype) -> None:
    batch = drawn(5)
    tensors = (batch.logp_BT.to(dtype), batch.old_BT.float(), batch.gain_BT.double(), batch.mask_BT)
    before = [tensor.clone() for tensor in tensors]
    assert LOSSES[name](*tensors).loss.dtype == dtype
    for old, new in zip(before, tensors, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(signs=HUGE, gain=st.sampled_from([-2.0, 3.0]))
def test_log_ratios_of_a_thousand_stay_finite(name: str, dtype: torch.dtype, signs: list[float], gain: float) -> None:
    logp_BT = torch.tensor([signs], dtype=dtype).clamp(max=0.0).requires_grad_()
    old_BT = torch.tensor([signs], dtype=dtype).neg().clamp(max=0.0)
    gain_BT = torch.full_like(old_BT, gain)
    result = LOSSES[name](logp_BT, old_BT, gain_BT, torch.ones_like(old_BT, dtype=torch.bool))
    (slope_BT,) = torch.autograd.grad(result.loss.sum(), logp_BT)
    assert result.loss.isfinite().all() and slope_BT.isfinite().all()
    assert all(math.isfinite(x) for x in (result.stats.approx_kl, result.stats.ratio_mean, result.stats.clip_fraction))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (3, 4)], ids=str)
def test_nothing_trained_is_no_loss_and_no_nan(name: str, shape: tuple[int, ...]) -> None:
    nan = torch.full(shape, math.nan, requires_grad=True)
    mask, sequences = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int64)
    result = LOSSES[name](nan, nan, nan, mask, sequences=sequences)
    (slope,) = torch.autograd.grad(result.loss.sum(), nan)
    assert result.loss.shape == shape and not result.loss.any() and not slope.any()
    assert (result.stats.clip_fraction, result.stats.ratio_mean, result.stats.approx_kl) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", [name for name in ALL if name != "clip_cov"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_the_gradient_is_the_plain_policy_gradient(name: str, dtype: torch.dtype) -> None:
    random.seed(0)
    old_BT = torch.tensor([[random.uniform(-3, -0.1) for _ in range(6)] for _ in range(4)], dtype=dtype)
    gain_BT = torch.tensor([[1.5], [-0.5], [-2.0], [0.0]], dtype=dtype).expand(4, 6)
    logp_BT = old_BT.clone().requires_grad_()
    result = LOSSES[name](logp_BT, old_BT, gain_BT, torch.ones(4, 6, dtype=torch.bool))
    (slope_BT,) = torch.autograd.grad(result.loss.sum(), logp_BT)
    torch.testing.assert_close(slope_BT, -gain_BT, rtol=1e-6, atol=1e-7)
    assert result.stats.ratio_mean == pytest.approx(1.0)
    if name != "kl_cov":  # there it counts the tokens held back, and those are there on fresh samples too
        assert result.stats.clip_fraction == 0.0


def test_clip_cov_drops_its_share_of_candidates_and_always_the_same() -> None:
    torch.manual_seed(0)
    logp_BT, old_BT = -torch.rand(10, 50) * 2, torch.full((10, 50), -1.0)
    old_BT = logp_BT.clone()  # on policy: nothing is clipped
    gain_BT = torch.randn(10, 50)
    mask_BT = torch.ones(10, 50, dtype=torch.bool)

    def dropped(seed: int, fraction: float) -> Tensor:
        settings = {"seed": seed, "fraction": fraction, "cov_low": 0.2, "cov_high": 2.0}
        return LOSSES["clip_cov"](logp_BT, old_BT, gain_BT, mask_BT, **settings).loss == 0

    covariance_BT = (gain_BT - gain_BT.mean()) * (logp_BT - logp_BT.mean())
    candidates = (covariance_BT > 0.2) & (covariance_BT < 2.0)
    assert int(dropped(0, 0.02).sum()) == 10
    assert not (dropped(0, 0.02) & ~candidates).any()
    assert int(dropped(0, 2e-4).sum()) == 1, "at least one"
    assert torch.equal(dropped(0, 1.0), candidates)
    assert torch.equal(dropped(3, 0.02), dropped(3, 0.02))
    assert not torch.equal(dropped(3, 0.02), dropped(4, 0.02))


@pytest.mark.parametrize("name", SEQUENCE)
def test_a_trajectory_of_several_rows_has_one_ratio(name: str) -> None:
    logp_BT = torch.tensor([[-1.0, -2.0], [-1.5, -1.0]], dtype=torch.float64)
    old_BT = torch.tensor([[-1.1, -1.8], [-1.5, -1.3]], dtype=torch.float64)
    one_BT, mask_BT = torch.ones_like(logp_BT), torch.ones(2, 2, dtype=torch.bool)
    settings = {"clip_low": 0.9, "clip_high": 0.9}
    joined = LOSSES[name](logp_BT, old_BT, one_BT, mask_BT, sequences=torch.tensor([[7, 7], [7, 7]]), **settings).loss
    mean = (0.1 - 0.2 + 0.0 + 0.3) / 4
    torch.testing.assert_close(joined, -torch.full((2, 2), math.exp(mean), dtype=torch.float64))
    apart = LOSSES[name](logp_BT, old_BT, one_BT, mask_BT, **settings).loss
    torch.testing.assert_close(apart[0], -torch.full((2,), math.exp((0.1 - 0.2) / 2), dtype=torch.float64))


def test_gspo_clamps_the_mean_log_ratio_at_ten_and_has_no_gradient_beyond() -> None:
    logp_BT = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old_BT, mask_BT = logp_BT.detach() - 12, torch.ones(1, 2, dtype=torch.bool)
    loss_BT = LOSSES["gspo"](logp_BT, old_BT, -torch.ones_like(old_BT), mask_BT).loss
    assert loss_BT.tolist() == [pytest.approx([math.exp(10)] * 2)]
    (slope_BT,) = torch.autograd.grad(loss_BT.sum(), logp_BT)
    assert not slope_BT.any()


@pytest.mark.parametrize("name", SEQUENCE)
def test_packed_tokens_need_their_sequences(name: str) -> None:
    logp_N, mask_N = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ConfigError, match="need `sequences`"):
        LOSSES[name](logp_N, logp_N, logp_N, mask_N)
    with pytest.raises(InvalidTrajectory, match="one int64 per token"):
        LOSSES[name](logp_N, logp_N, logp_N, mask_N, sequences=torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("name", ALL)
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    three, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(InvalidTrajectory, match="one shape"):
        LOSSES[name](three, torch.zeros(1, 2), three, mask)
    with pytest.raises(InvalidTrajectory, match="mask is bool"):
        LOSSES[name](three, three, three, mask.long())


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("ppo_clip", "dual_clip", 1.0),
        ("gspo", "clip_low", 0.0),
        ("gspo", "clip_low", 1.0),
        ("gspo", "clip_high", -1.0),
        ("geo_mean", "clip_low", 0.0),
        ("geo_mean", "clip_high", math.nan),
        ("cispo", "clip_low", 0.0),
        ("cispo", "clip_high", 0.0),
        ("reinforce", "max_ratio", 0.0),
        ("dppo_tv", "clip_low", 0.0),
        ("dppo_tv", "max_ratio", 1.0),
        ("dppo_kl", "clip_high", 0.0),
        ("sapo", "tau_positive", 0.0),
        ("sapo", "tau_negative", -1.0),
        ("dro", "beta", -0.1),
        ("clip_cov", "clip_low", 1.0),
        ("clip_cov", "clip_high", 0.0),
        ("clip_cov", "fraction", 0.0),
        ("clip_cov", "cov_low", 5.0),
        ("kl_cov", "fraction", 1.5),
        ("kl_cov", "kl_coefficient", -1.0),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is {value}"):
        loss_with(name, {setting: value})


def test_unknown_settings_and_wrong_types_are_named() -> None:
    with pytest.raises(ConfigError, match=r"gspo has no setting 'clip_hi'.*clip_high.*Its settings: clip_low"):
        loss_with("gspo", {"clip_hi": 0.1})
    with pytest.raises(ConfigError, match=r"gpg has no setting 'clip_low'.*none"):
        loss_with("gpg", {"clip_low": 0.1})
    with pytest.raises(ConfigError, match="'clip_low' of gspo is float, got 'much'"):
        loss_with("gspo", {"clip_low": "much"})
    with pytest.raises(ConfigError, match="'seed' of clip_cov is int, got True"):
        loss_with("clip_cov", {"seed": True})
    assert loss_with("reinforce", {"max_ratio": None}) is not None
    assert loss_with("reinforce", {"max_ratio": 2}) is not None


def test_a_loss_without_traits_relies_on_nothing() -> None:
    @traits()
    def own(*_: object) -> None: ...

    assert not is_elementwise(own) and not is_silent_at_zero(own)  # type: ignore[arg-type]
