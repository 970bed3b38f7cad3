"""Estimates of the divergence between policy and reference, per sampled token: `k1`, `k2`, `k3`.

All three (Schulman 2020, "Approximating KL Divergence") estimate the VALUE of KL(policy || reference) from tokens that
the policy sampled, with `log r = ref_logp - logp`. What they give as a LOSS is another matter, since the samples do not
follow the parameters; each docstring names the gradient that its expectation has when the tokens come from the current
policy. The statements are exact for on-policy tokens and approximate on later minibatches.

Shapes: `N` packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from agentgym.registry import Registry

__all__ = ["KL_ESTIMATORS", "KLEstimator", "k1", "k2", "k3"]

KLEstimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]

KL_ESTIMATORS: Registry[KLEstimator] = Registry("KL estimator")
"""Every estimator by name: `(logp_N, ref_logp_N) -> kl_N`."""

MAX_LOG_RATIO = 20.0
"""`k3` clamps `log r` to this many nats either way: e^20 is 4.9e8, well inside float32."""


@KL_ESTIMATORS.register("k1")
def k1(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """`-log r = logp - ref_logp`: unbiased, of either sign, of high variance.

    Gradient as a loss: `grad logp`, whose expectation is ZERO, so it regularizes nothing and only adds noise. It
    belongs in the reward, or in a metric; as a loss term use `k2`.
    """
    return logp_N - ref_logp_N.detach()


@KL_ESTIMATORS.register("k2")
def k2(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """`(log r)^2 / 2`: biased in value, never negative, of low variance.

    Gradient as a loss: `(logp - ref_logp) grad logp`, whose expectation is exactly the gradient of
    KL(policy || reference), the divergence that RLHF objectives name.
    """
    return 0.5 * (logp_N - ref_logp_N.detach()).square()


@KL_ESTIMATORS.register("k3")
def k3(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """`r - 1 - log r`: unbiased, never negative, of low variance; GRPO's term (Shao et al. 2024, eq. 4).

    Gradient as a loss: `(1 - r) grad logp`, whose expectation is the gradient of KL(reference || policy), the OTHER
    direction; near the reference the two agree to first order.

    Difference: `log r` is clamped to `MAX_LOG_RATIO` either way; beyond it the value is that of the bound and the
    gradient is 0.
    """
    log_ratio_N = (ref_logp_N.detach() - logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio_N) - log_ratio_N
