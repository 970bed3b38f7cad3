"""Every correction against plain loops over floats, and what all of them keep to.

Shapes: `B` row, `T` token, `N` packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.trainers.algorithms.corrections import CORRECTIONS, Correction, proximal_logp

ALL = sorted(CORRECTIONS)
WHOLE = ["mis_sequence", "reject_k1", "reject_k2", "reject_k3", "tis_sequence"]
Rows = list[list[float]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def token(weight: Callable[[float], float]) -> Callable[[Rows], Rows]:
    """A correction whose weight follows from a token's own log ratio."""
    return lambda rows: [[weight(math.exp(d)) for d in row] for row in rows]


def sequence(weight: Callable[[list[float]], float]) -> Callable[[Rows], Rows]:
    """A correction whose weight follows from all log ratios of a trajectory."""
    return lambda rows: [[weight(row)] * len(row) for row in rows]


def k3s(row: list[float]) -> list[float]:
    return [math.exp(d) - 1 - d for d in row]


def normalized(correct: Callable[[Rows], Rows], per_row: bool) -> Callable[[Rows], Rows]:
    """Weights divided by their mean over tokens, or over rows."""

    def divided(rows: Rows) -> Rows:
        weights = correct(rows)
        units = [mean(row) for row in weights] if per_row else [w for row in weights for w in row]
        return [[w / mean(units) for w in row] for row in weights]

    return divided


cut_token = token(lambda r: min(r, 1.3))
cut_sequence = sequence(lambda row: min(math.exp(sum(row)), 1.5))
CASES = [
    ("tis_token", {"cap": 1.3}, cut_token),
    ("tis_token", {"cap": 1.3, "normalize": True}, normalized(cut_token, per_row=False)),
    ("tis_sequence", {"cap": 1.5}, cut_sequence),
    ("tis_sequence", {"cap": 1.5, "normalize": True}, normalized(cut_sequence, per_row=True)),
    ("mis_token", {"cap": 1.3}, token(lambda r: r if r <= 1.3 else 0.0)),
    ("mis_sequence", {"cap": 1.5}, sequence(lambda row: math.exp(sum(row)) if math.exp(sum(row)) <= 1.5 else 0.0)),
    ("icepop", {"alpha": 0.7, "beta": 1.4}, token(lambda r: r if 0.7 <= r <= 1.4 else 0.0)),
    (
        "icepop",
        {"alpha": 0.7, "beta": 1.4, "normalize": True},
        normalized(token(lambda r: r if 0.7 <= r <= 1.4 else 0.0), per_row=False),
    ),
    ("reject_k1", {"low": 0.8, "high": 1.1}, sequence(lambda row: float(0.8 <= math.exp(mean(row)) <= 1.1))),
    (
        "reject_k1",
        {"low": 0.5, "high": 1.2, "statistic": "sum"},
        sequence(lambda row: float(0.5 <= math.exp(sum(row)) <= 1.2)),
    ),
    ("reject_k2", {"high": 0.05}, sequence(lambda row: float(mean([d * d / 2 for d in row]) <= 0.05))),
    (
        "reject_k2",
        {"high": 0.2, "statistic": "max"},
        sequence(lambda row: float(max(d * d / 2 for d in row) <= 0.2)),
    ),
    ("reject_k3", {"high": 0.05}, sequence(lambda row: float(mean(k3s(row)) <= 0.05))),
    ("reject_k3", {"high": 0.2, "statistic": "sum"}, sequence(lambda row: float(sum(k3s(row)) <= 0.2))),
    ("reject_k3", {"high": 0.2, "statistic": "max"}, sequence(lambda row: float(max(k3s(row)) <= 0.2))),
    ("decoupled_ppo", {}, token(lambda r: r)),
    ("decoupled_ppo", {"cap": 1.3}, token(lambda r: r if r <= 1.3 else 0.0)),
]
IDS = [f"{name}-{settings}" for name, settings, _ in CASES]


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Old and sampled logprobs, NaN outside of a random mask; the third of six rows has nothing trained."""
    generator = torch.Generator().manual_seed(seed)
    sampler_BT = -3 * torch.rand(6, 5, generator=generator, dtype=dtype)
    old_BT = sampler_BT + 0.35 * torch.randn(6, 5, generator=generator, dtype=dtype)
    mask_BT = torch.rand(6, 5, generator=generator) < 0.7
    mask_BT[2] = False
    return torch.where(mask_BT, old_BT, math.nan), torch.where(mask_BT, sampler_BT, math.nan), mask_BT


def correct(name: str, old: Tensor, sampled: Tensor, mask: Tensor, **settings: object) -> Correction:
    """With versions where they are needed: all tokens three versions old."""
    if name == "proximal_by_version":
        settings = {"versions": torch.full(old.shape, 4), "current": 7, **settings}
    return CORRECTIONS[name](old, sampled, mask, **settings)


@pytest.mark.parametrize(("name", "settings", "reference"), CASES, ids=IDS)
def test_the_weights_are_those_of_plain_loops(
    name: str, settings: dict[str, float], reference: Callable[[Rows], Rows]
) -> None:
    cut = 0
    for seed in range(6):
        old_BT, sampler_BT, mask_BT = drawn(seed)
        result = CORRECTIONS[name](old_BT, sampler_BT, mask_BT, **settings)
        trained = [row for row in range(6) if mask_BT[row].any()]
        expected = reference([(old_BT - sampler_BT)[row][mask_BT[row]].tolist() for row in trained])
        for row, weights in zip(trained, expected, strict=True):
            assert result.weights[row][mask_BT[row]].tolist() == pytest.approx(weights, abs=1e-12)
            assert result.kept[row][mask_BT[row]].tolist() == [weight > 0 for weight in weights]
            cut += sum(weight == 0 for weight in weights)
        assert not result.weights[~mask_BT].any() and not result.kept[~mask_BT].any()
    rejects = name.startswith(("mis", "ice", "reject")) or (name == "decoupled_ppo" and "cap" in settings)
    assert (cut > 0) == rejects


def test_every_correction_has_a_reference() -> None:
    assert sorted({*(name for name, _, _ in CASES), "proximal_by_version"}) == ALL


@pytest.mark.parametrize("name", ["tis_token", "tis_sequence", "mis_token", "mis_sequence", "icepop"])
def test_normalized_weights_have_the_mean_one(name: str) -> None:
    old_BT, sampler_BT, mask_BT = drawn(7)
    weights_BT = CORRECTIONS[name](old_BT, sampler_BT, mask_BT, normalize=True).weights
    if name.endswith("sequence"):
        per_row = [weights_BT[row][mask_BT[row]].mean().item() for row in range(6) if mask_BT[row].any()]
        assert mean(per_row) == pytest.approx(1.0)
    else:
        assert weights_BT[mask_BT].mean().item() == pytest.approx(1.0)


@pytest.mark.parametrize("name", ALL)
def test_a_random_mask_equals_the_compacted_sequence(name: str) -> None:
    old_BT, sampler_BT, mask_BT = drawn(3)
    whole = correct(name, old_BT, sampler_BT, mask_BT)
    rows_N = torch.arange(6)[:, None].expand(6, 5)[mask_BT] * 10 + 3
    packed = correct(name, old_BT[mask_BT], sampler_BT[mask_BT], mask_BT[mask_BT], sequences=rows_N)
    torch.testing.assert_close(packed.weights, whole.weights[mask_BT], rtol=0, atol=1e-12)
    assert torch.equal(packed.kept, whole.kept[mask_BT])


@pytest.mark.parametrize("name", ALL)
def test_where_engine_and_trainer_agree_every_weight_is_one(name: str) -> None:
    _, sampler_BT, mask_BT = drawn(4)
    result = correct(name, sampler_BT, sampler_BT, mask_BT)
    torch.testing.assert_close(result.weights, mask_BT.double(), rtol=0, atol=1e-12)
    assert torch.equal(result.kept, mask_BT)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
def test_log_ratios_of_a_thousand_stay_finite(name: str, dtype: torch.dtype, gap: float) -> None:
    old_BT = torch.full((2, 3), min(gap, 0.0), dtype=dtype)
    result = correct(name, old_BT, old_BT - gap, torch.ones(2, 3, dtype=torch.bool))
    assert result.weights.isfinite().all() and result.weights.dtype == dtype
    assert not result.weights[~result.kept].any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (3, 4)], ids=str)
def test_nothing_trained_has_no_weight_and_no_nan(name: str, shape: tuple[int, ...]) -> None:
    nan, mask = torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool)
    settings = {"normalize": True} if name in ("tis_token", "tis_sequence", "icepop") else {}
    result = correct(name, nan, nan, mask, sequences=torch.zeros(shape, dtype=torch.int64), **settings)
    assert result.weights.shape == shape and not result.weights.any() and not result.kept.any()


@pytest.mark.parametrize("name", ALL)
def test_weights_carry_no_gradient_and_inputs_stay_as_they_are(name: str) -> None:
    old_BT, sampler_BT, mask_BT = drawn(5)
    before = (old_BT.clone(), sampler_BT.clone())
    result = correct(name, old_BT.requires_grad_(), sampler_BT.requires_grad_(), mask_BT)
    assert not result.weights.requires_grad
    for old, new in zip(before, (old_BT, sampler_BT), strict=True):
        torch.testing.assert_close(old, new.detach(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", WHOLE)
def test_packed_tokens_need_their_sequences(name: str) -> None:
    with pytest.raises(ConfigError, match="need `sequences`"):
        CORRECTIONS[name](torch.zeros(3), torch.zeros(3), torch.ones(3, dtype=torch.bool))


def test_the_bounds_of_k1_are_on_old_over_sampled() -> None:
    # the trainer finds each token three times as likely as the engine did
    sampler_BT, mask_BT = torch.full((1, 2), -3.0), torch.ones(1, 2, dtype=torch.bool)
    old_BT = sampler_BT + math.log(3)
    assert CORRECTIONS["reject_k1"](old_BT, sampler_BT, mask_BT, low=0.5, high=4.0).kept.all()
    assert not CORRECTIONS["reject_k1"](old_BT, sampler_BT, mask_BT, low=0.25, high=2.0).kept.any()


def test_the_proximal_policy_lies_between_the_one_that_sampled_and_the_current_one() -> None:
    # ages 0, 1, 2, 4 and one outside of the mask; one version behind the current one
    old_N, sampler_N = torch.full((5,), -1.0), torch.tensor([-1.1, -1.5, -2.0, -3.0, math.nan])
    versions_N = torch.tensor([9, 8, 7, 5, 99])
    mask_N = torch.tensor([True, True, True, True, False])
    proximal_N = proximal_logp(old_N, sampler_N, mask_N, versions=versions_N, current=9)
    assert proximal_N.tolist() == pytest.approx([-1.1, -1.5, -1.5, -1.5, 0.0])
    inputs = (old_N, sampler_N, mask_N)
    result = CORRECTIONS["proximal_by_version"](*inputs, versions=versions_N, current=9)
    assert result.weights.tolist() == pytest.approx([1.0, 1.0, math.exp(0.5), math.exp(1.5), 0.0])
    capped = CORRECTIONS["proximal_by_version"](*inputs, versions=versions_N, current=9, cap=2.0)
    assert capped.kept.tolist() == [True, True, True, False, False]
    level_N = proximal_logp(*inputs, versions=versions_N, current=9, behind=0)
    assert level_N.tolist() == pytest.approx([-1.1, -1.0, -1.0, -1.0, 0.0])


def test_versions_are_asked_for_and_checked() -> None:
    logp, mask = torch.zeros(1), torch.ones(1, dtype=torch.bool)
    with pytest.raises(ConfigError, match="needs `versions`"):
        CORRECTIONS["proximal_by_version"](logp, logp, mask)
    with pytest.raises(ConfigError, match="newer than the current version 3"):
        proximal_logp(logp, logp, mask, versions=torch.tensor([4]), current=3)
    with pytest.raises(InvalidTrajectory, match="versions have the shape"):
        proximal_logp(logp, logp, mask, versions=torch.tensor([4, 4]), current=9)


@pytest.mark.parametrize("name", ALL)
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(InvalidTrajectory, match="one shape"):
        correct(name, torch.zeros(1, 3), torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        *((name, {"cap": 0.0}, "cap is 0.0") for name in ("tis_token", "tis_sequence", "mis_token", "mis_sequence")),
        ("decoupled_ppo", {"cap": -1.0}, "cap is -1.0"),
        ("icepop", {"alpha": 0.0}, "alpha is 0.0"),
        ("icepop", {"alpha": 6.0}, "at most beta, which is 5.0"),
        ("reject_k1", {"low": 3.0}, "at most high, which is 2.0"),
        ("reject_k1", {"statistic": "max"}, "statistic is max"),
        ("reject_k2", {"high": 0.0}, "high is 0.0"),
        ("reject_k3", {"statistic": "median"}, "statistic is median"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, settings: dict[str, object], message: str) -> None:
    logp, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ConfigError, match=message):
        CORRECTIONS[name](logp, logp, mask, **settings)
