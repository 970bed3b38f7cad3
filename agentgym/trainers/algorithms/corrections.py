"""Weights for tokens that another policy sampled than the one the loss starts from: one pure function per correction.

The contract of an entry of `CORRECTIONS`: `name(old_logp, sampled_logp, mask, *, sequences=None, <settings>)`.

`old_logp`: the sampled tokens' logprobs under the trainer's weights before the step (what the loss takes its ratio
against). `sampled_logp`: those that the engine sampled with; both natural logarithms. `mask`: bool, True where a token
is trained. All have one shape, packed `[N]` or padded `[B, T]`; `sequences` (int64) is the number of every token's
trajectory, for corrections of whole trajectories, and `[B, T]` has its rows as a default. A token's loss is multiplied
by its weight, which carries no gradient; with `r = exp(old_logp - sampled_logp)` the plain weight is r. Weights are
exactly 0 outside of the mask and for whatever is not kept, whatever the numbers there are. Log ratios, of a token or a
whole trajectory, are clamped to `MAX_LOG_RATIO` either way, as in verl. Settings are keywords, and raise ConfigError
where they cannot work. The names follow the papers; verl's are `rollout_is` (tis, icepop) and `rollout_rs` (reject).

The bundled corrections are written as `(tokens, *, <settings>)` over `SampledTokens`. Each is a weight (1, or the ratio
of a token or a trajectory, cut at a cap or not) and a mask of what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.registry import Registry
from agentgym.settings.functions import Contract, with_inputs
from agentgym.trainers.algorithms.kl import MAX_LOG_RATIO
from agentgym.trainers.algorithms.losses.policy_loss import check_shapes, require
from agentgym.trainers.algorithms.sequences import Sequences

__all__ = ["CORRECTIONS", "Correction", "CorrectionFn", "proximal_logp"]


@dataclass(frozen=True, eq=False)
class Correction:
    """The factors that the tokens' losses are multiplied by, without gradient.

    Example: ratios (1, 3) under `tis_token` are `weights` (1, 2), both kept; under `mis_token` (1, 0), the first kept.
    """

    weights: Tensor
    """The factor of each token, of the shape and type of `old_logp`; 0 wherever `kept` is False."""
    kept: Tensor
    """bool; False outside of the mask and for tokens that are rejected."""


CorrectionFn: TypeAlias = Callable[..., Correction]
"""`(old_logp, sampled_logp, mask, *, sequences=None, <settings>) -> Correction`, see the module."""

CORRECTIONS: Registry[CorrectionFn] = Registry(
    "off-policy correction",
    "`agentgym algorithms list` shows all.",
    check=Contract("off-policy correction", ("old_logp", "sampled_logp", "mask"), keywords=("sequences",)).check,
)
"""Every correction by name; `CORRECTIONS.register(name)` adds one, and `path/to/file.py:name` is one of a file."""

Statistic: TypeAlias = Literal["mean", "sum", "max"]


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """The inputs of a correction."""

    old_logp: Tensor
    sampled_logp: Tensor
    mask: Tensor
    sequences: Tensor | None
    log_ratio: Tensor
    """`log r` in float64, not clamped, 0 outside of the mask."""

    @classmethod
    def of(
        cls, old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, sequences: Tensor | None = None
    ) -> SampledTokens:
        """Raises InvalidTrajectory for tensors of different shapes, or a mask that is not bool."""
        check_shapes(mask, old_logp=old_logp, sampled_logp=sampled_logp)
        log_ratio = torch.where(mask, old_logp.double() - sampled_logp.double(), 0.0)
        return cls(old_logp, sampled_logp, mask, sequences, log_ratio)

    @property
    def bounded_log_ratio(self) -> Tensor:
        """`log r`, clamped to `MAX_LOG_RATIO` either way."""
        return self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def trajectories(self, algorithm: str) -> Sequences:
        """The trajectories of the tokens; raises ConfigError, naming `algorithm`, if packed without `sequences`."""
        return Sequences.of(self.sequences, self.old_logp, algorithm)

    def ratio(self, whole: Sequences | None = None) -> Tensor:
        """The ratio r of each token, or of its whole trajectory."""
        return _exp(self.log_ratio) if whole is None else whole.spread(_exp(whole.sum(self.log_ratio)))


def _over_sampled_tokens(function: CorrectionFn) -> CorrectionFn:
    """Returns a correction of `(tokens, *, <settings>)` as one that takes what an entry of `CORRECTIONS` takes."""
    return torch.no_grad()(with_inputs(function, SampledTokens.of))


@CORRECTIONS.register("tis_token")
@_over_sampled_tokens
def tis_token(tokens: SampledTokens, *, cap: float = 2.0, normalize: bool = False) -> Correction:
    """Truncated importance sampling per token: `min(r, cap)`.

    Ionides 2008 (Truncated Importance Sampling); for engine and trainer Yao et al. 2025 (Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training). Of low variance, and biased: the ratios of earlier tokens are left out.
    `cap` is above 0. `normalize` divides by the mean weight of the trained tokens, so that the weights have the
    mean 1. Arguments as in the module. Equal to verl's `rollout_is: token`.
    """
    _check_cap(cap)
    return _correction(tokens, tokens.ratio().clamp(max=cap), normalize=normalize)


@CORRECTIONS.register("tis_sequence")
@_over_sampled_tokens
def tis_sequence(tokens: SampledTokens, *, cap: float = 2.0, normalize: bool = False) -> Correction:
    """Truncated importance sampling per trajectory: `min(product of r, cap)` for each of its tokens.

    Ionides 2008 (Truncated Importance Sampling); for engine and trainer Liu et al. 2025 (When Speed Kills Stability).
    Unbiased below the cap, of a variance that grows with length. `cap` is above 0. `normalize` divides by the mean
    weight of the trajectories, each counted once. Arguments as in the module. Equal to verl's `rollout_is: sequence`.
    """
    _check_cap(cap)
    whole = tokens.trajectories("tis_sequence")
    return _correction(tokens, tokens.ratio(whole).clamp(max=cap), normalize=normalize, whole=whole)


@CORRECTIONS.register("mis_token")
@_over_sampled_tokens
def mis_token(tokens: SampledTokens, *, cap: float = 2.0, normalize: bool = False) -> Correction:
    """Masked importance sampling per token: r where `r <= cap`, else 0.

    Liu et al. 2025 (When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch): a token
    far too likely for the engine to have sampled is left out instead of held at the cap. Settings as in `tis_token`;
    `normalize` counts rejected tokens as 0. Arguments as in the module. verl has it as `icepop` with a bound below.
    """
    _check_cap(cap)
    ratio = tokens.ratio()
    return _correction(tokens, ratio, ratio <= cap, normalize=normalize)


@CORRECTIONS.register("mis_sequence")
@_over_sampled_tokens
def mis_sequence(tokens: SampledTokens, *, cap: float = 2.0, normalize: bool = False) -> Correction:
    """Masked importance sampling per trajectory: the product of r where it is at most `cap`, else 0.

    Liu et al. 2025 (When Speed Kills Stability), sequence-level MIS. Settings as in `tis_sequence`; `normalize` counts
    rejected trajectories as 0. Arguments as in the module.
    """
    _check_cap(cap)
    whole = tokens.trajectories("mis_sequence")
    ratio = tokens.ratio(whole)
    return _correction(tokens, ratio, ratio <= cap, normalize=normalize, whole=whole)


@CORRECTIONS.register("icepop")
@_over_sampled_tokens
def icepop(tokens: SampledTokens, *, alpha: float = 0.5, beta: float = 5.0, normalize: bool = False) -> Correction:
    """r where `alpha <= r <= beta`, else 0: tokens on which engine and trainer disagree either way are left out.

    Ling Team 2025 (Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model), IcePop.
    `0 < alpha <= beta`. `normalize` divides by the mean weight of the trained tokens, rejected ones counted as 0.
    Arguments as in the module. Equal to verl's `rollout_is: token` with a threshold `alpha_beta`.
    """
    require(0 < alpha <= beta, "alpha", alpha, f"be above 0 and at most beta, which is {beta}")
    ratio = tokens.ratio()
    return _correction(tokens, ratio, (ratio >= alpha) & (ratio <= beta), normalize=normalize)


@CORRECTIONS.register("reject_k1")
@_over_sampled_tokens
def reject_k1(
    tokens: SampledTokens, *, statistic: Statistic = "mean", low: float = 0.5, high: float = 2.0
) -> Correction:
    """Weight 1 for trajectories with `low <= exp(statistic of log r) <= high`, 0 for the others.

    Liu et al. 2025 (When Speed Kills Stability), the geometric rejection for the mean. `statistic` is the mean or the
    sum over the trajectory's trained tokens; `0 < low <= high`, as ratios old / sampled. Arguments as in the module.

    Difference from verl's `seq_mean_k1` and `seq_sum_k1`: there the bounds are compared with sampled / old, the inverse
    of what the setting is documented as, so (0.5, 4) keeps ratios from 0.25 to 2. With low = 1 / high the two agree.
    """
    require(0 < low <= high, "low", low, f"be above 0 and at most high, which is {high}")
    require(statistic in ("mean", "sum"), "statistic", statistic, "be 'mean' or 'sum' for k1, which has either sign")
    whole = tokens.trajectories("reject_k1")
    ratio = whole.spread(_exp(_statistic(statistic, tokens.bounded_log_ratio, tokens.mask, whole)))
    return _correction(tokens, torch.ones_like(ratio), (ratio >= low) & (ratio <= high))


@CORRECTIONS.register("reject_k2")
@_over_sampled_tokens
def reject_k2(tokens: SampledTokens, *, statistic: Statistic = "mean", high: float = 0.01) -> Correction:
    """Weight 1 for trajectories whose statistic of `(log r)^2 / 2` is at most `high`, 0 for the others.

    The estimate k2 of Schulman 2020 (Approximating KL Divergence). `statistic` is the mean, sum or max over the
    trajectory's trained tokens; `high` is above 0, in nats. Arguments as in the module. Equal to verl's `seq_mean_k2`,
    `seq_sum_k2` and `seq_max_k2`, which have no default bound.
    """
    return _reject(tokens, 0.5 * tokens.bounded_log_ratio.square(), statistic, high, "reject_k2")


@CORRECTIONS.register("reject_k3")
@_over_sampled_tokens
def reject_k3(tokens: SampledTokens, *, statistic: Statistic = "mean", high: float = 0.01) -> Correction:
    """Weight 1 for trajectories whose statistic of `r - 1 - log r` is at most `high`, 0 for the others.

    The estimate k3 of Schulman 2020 (Approximating KL Divergence), of KL(sampled || old). `statistic` is the mean, sum
    or max over the trajectory's trained tokens; `high` is above 0, in nats. Arguments as in the module. Equal to verl's
    `seq_mean_k3`, `seq_sum_k3` and `seq_max_k3`, which have no default bound.
    """
    log_ratio = tokens.bounded_log_ratio
    return _reject(tokens, torch.expm1(log_ratio) - log_ratio, statistic, high, "reject_k3")


@CORRECTIONS.register("decoupled_ppo")
@_over_sampled_tokens
def decoupled_ppo(tokens: SampledTokens, *, cap: float | None = None) -> Correction:
    """r, the weight of the proximal policy against the one that sampled; 0 where it is above `cap`.

    Hilton et al. 2022 (Batch size-invariance for policy optimization); Fu et al. 2025 (AReaL), section 5.2:
    `pi_prox / pi_behav * clip surrogate(pi / pi_prox)`, with the proximal policy in the place of `old_logp`: the clip
    holds the policy near recent weights, however old the samples are. `cap` is above 0, or None for none. Arguments as
    in the module. Without cap this is `tis_token` without its own.
    """
    require(cap is None or cap > 0, "cap", cap, "be above 0 (5.0 is usual), or None for no bound")
    ratio = tokens.ratio()
    return _correction(tokens, ratio, None if cap is None else ratio <= cap)


@CORRECTIONS.register("proximal_by_version")
@_over_sampled_tokens
def proximal_by_version(
    tokens: SampledTokens, *, versions: Tensor | None = None, current: int | None = None, cap: float | None = None
) -> Correction:
    """`exp(proximal_logp - sampled_logp)`: the weight of decoupled PPO whose proximal policy is read off the versions.

    `versions` (int64, of the tokens' shape) names the weights that sampled each token, `current` those that `old_logp`
    comes from; both are needed. See `proximal_logp`, which the loss takes in the place of `old_logp`. `cap` is that of
    `decoupled_ppo`. Arguments as in the module.
    """
    if versions is None or current is None:
        raise ConfigError("proximal_by_version needs `versions`, the weights of every token, and `current`, the newest")
    inputs = (tokens.sampled_logp, tokens.mask)
    return decoupled_ppo(proximal_logp(tokens.old_logp, *inputs, versions=versions, current=current), *inputs, cap=cap)


@torch.no_grad()
def proximal_logp(
    old_logp: Tensor, sampled_logp: Tensor, mask: Tensor, *, versions: Tensor, current: int, behind: int = 1
) -> Tensor:
    """The logprobs of the policy `behind` versions before `current`, interpolated between two that are known.

    `sampled + a (old - sampled)` with `a = (current - behind - version) / (current - version)`, clamped to [0, 1] and 0
    for tokens of the current version: the log-linear approximation of AReaL (Fu et al. 2025, in its implementation),
    which saves a forward pass. Exact where logprobs move evenly from version to version. 0 outside of the mask. Raises
    ConfigError for versions above `current`.
    """
    require(behind >= 0, "behind", behind, "be at least 0")
    log_ratio = SampledTokens.of(old_logp, sampled_logp, mask).log_ratio
    if versions.shape != old_logp.shape:
        raise InvalidTrajectory(f"versions have the shape {tuple(old_logp.shape)}, got {tuple(versions.shape)}")
    age = torch.where(mask, current - versions, 0).to(torch.float64)
    if bool((age < 0).any()):
        raise ConfigError(f"a token was sampled by weights newer than the current version {current}")
    share = ((age - behind) / age.clamp(min=1)).clamp(0, 1)
    return torch.where(mask, sampled_logp + share * log_ratio, 0.0).to(old_logp.dtype)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _check_cap(cap: float) -> None:
    require(cap > 0, "cap", cap, "be above 0 (2.0 is usual)")


def _statistic(statistic: Statistic, values: Tensor, mask: Tensor, whole: Sequences) -> Tensor:
    """The mean, sum or max of the values (0 outside of the mask) of each trajectory, `[S]`."""
    if statistic == "mean":
        return whole.mean(values, mask)
    return whole.sum(values) if statistic == "sum" else whole.max(values)


def _reject(tokens: SampledTokens, divergence: Tensor, statistic: Statistic, high: float, name: str) -> Correction:
    """Keeps the trajectories whose statistic of `divergence` (at least 0, and 0 outside of the mask) is in bounds."""
    require(high > 0, "high", high, "be above 0")
    require(statistic in ("mean", "sum", "max"), "statistic", statistic, "be 'mean', 'sum' or 'max'")
    whole = tokens.trajectories(name)
    is_kept = whole.spread(_statistic(statistic, divergence, tokens.mask, whole)) <= high
    return _correction(tokens, torch.ones_like(divergence), is_kept)


def _correction(
    tokens: SampledTokens,
    weights: Tensor,
    is_kept: Tensor | None = None,
    *,
    normalize: bool = False,
    whole: Sequences | None = None,
) -> Correction:
    """The weights of what is kept; normalized over trained tokens, or over the trajectories of `whole`."""
    mask = tokens.mask
    is_kept = mask if is_kept is None else is_kept & mask
    weights = torch.where(is_kept, weights, 0.0)
    if normalize:
        units = mask.double() if whole is None else whole.spread(1 / whole.sum(mask).clamp(min=1)) * mask
        mean = (units * weights).sum() / units.sum().clamp(min=1)
        weights = torch.where(mean > 0, weights / mean, weights)
    return Correction(weights.to(tokens.old_logp.dtype), is_kept)


CORRECTION_INPUTS = ("sequences", "versions", "current")
"""Keywords of a correction that are not settings: a step passes those that the correction takes."""
