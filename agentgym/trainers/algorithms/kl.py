"""Penalties for moving away from a reference policy, per sampled token.

The contract of an entry of `KL_PENALTIES`: `name(logp, ref_logp)`, natural logarithms of any one shape, to a penalty
per token; `logp` alone carries gradient. With `log r = ref_logp - logp`, k1, k2 and k3 (Schulman 2020, "Approximating
KL Divergence") estimate the VALUE of KL(policy || reference) from tokens that the policy sampled. What they give as a
LOSS is another matter, since the samples do not follow the parameters; each docstring names the value's bias and the
gradient that its expectation has when the tokens come from the current policy. The statements are exact for on-policy
tokens and approximate on later minibatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.registry import Registry
from agentgym.settings.functions import Contract, convert_function_errors

__all__ = [
    "KL_PENALTIES",
    "MAX_LOG_RATIO",
    "KLPenalty",
    "abs_kl",
    "k1",
    "k1_st",
    "k2",
    "k3",
    "k3_st",
    "low_var",
    "low_var_st",
    "penalty_of",
]

KLPenalty: TypeAlias = Callable[[Tensor, Tensor], Tensor]

KL_PENALTIES: Registry[KLPenalty] = Registry(
    "KL penalty",
    "`agentgym algorithms list` shows all.",
    check=Contract("KL penalty", ("logp", "ref_logp")).check,
)
"""Every penalty by name: `(logp, ref_logp) -> penalty`.

`KL_PENALTIES.register(name)` adds one, and `path/to/file.py:name` is one of a file."""

MAX_LOG_RATIO = 20.0
"""The bound in nats that a ratio's logarithm is clamped to either way. e^20 is 4.9e8, whose square is finite."""
MAX_LOW_VAR = 10.0
"""The largest value of `low_var`, in nats."""


@KL_PENALTIES.register("k1")
def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """`-log r = logp - ref_logp`: unbiased, of either sign, of high variance.

    Gradient as a loss: `grad logp`, whose expectation is ZERO, so it regularizes nothing and only adds noise. It
    belongs in the reward, or in a metric; as a loss term use `k2` or `k1_st`. verl: `k1`, `kl`.
    """
    return logp - ref_logp.detach()


@KL_PENALTIES.register("k2")
def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """`(log r)^2 / 2`: biased in value, never negative, of low variance.

    Gradient as a loss: `(logp - ref_logp) grad logp`, whose expectation is exactly the gradient of
    KL(policy || reference), the divergence that RLHF objectives name. verl: `k2`, `mse`.
    """
    return 0.5 * (logp - ref_logp.detach()).square()


@KL_PENALTIES.register("k3")
def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """`r - 1 - log r`: unbiased, never negative, of low variance; GRPO's term (Shao et al. 2024, eq. 4).

    Gradient as a loss: `(1 - r) grad logp`, whose expectation is the gradient of KL(reference || policy), the OTHER
    direction; near the reference the two agree to first order.

    Difference: `log r` is clamped to `MAX_LOG_RATIO` either way; beyond it the value is that of the bound and the
    gradient is 0. verl's `k3` also holds the value at 10, which is `low_var` here.
    """
    log_ratio = (ref_logp.detach() - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


@KL_PENALTIES.register("abs")
def abs_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """`|log r|`: no estimate of the divergence; never below |k1|, so its expectation is at least the divergence.

    Gradient as a loss: `sign(logp - ref_logp) grad logp` (0 where they are equal), whose expectation is twice the
    gradient of the probability of all tokens that are likelier than under the reference. verl: `abs`.
    """
    return (logp - ref_logp.detach()).abs()


@KL_PENALTIES.register("low_var")
def low_var(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """`min(k3, 10)`: k3 whose rare huge values are cut off, as in verl (`low_var_kl`, and its `k3`).

    Value: below the divergence by what is cut, where the reference finds a sampled token more than 13.6 times as likely
    (log r above 2.61), or the policy does by more than e^11. Gradient as a loss: that of `k3`, and 0 where the value is
    cut, so the tokens farthest from the reference are not drawn back: a reason to prefer `k3` or `k2`.
    """
    return k3(logp, ref_logp).clamp(max=MAX_LOW_VAR)


@KL_PENALTIES.register("k1_st")
def k1_st(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The value of `k1`, unbiased, with the gradient of `k2`, that of KL(policy || reference): verl's `k1+`."""
    return _straight_through(k1, logp, ref_logp)


@KL_PENALTIES.register("k3_st")
def k3_st(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The value of `k3`, unbiased, with the gradient of `k2`, that of KL(policy || reference): verl's `k3+`.

    Difference from verl: the value is not held at 10; `low_var_st` is.
    """
    return _straight_through(k3, logp, ref_logp)


@KL_PENALTIES.register("low_var_st")
def low_var_st(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The value of `low_var` with the gradient of `k2`, that of KL(policy || reference): verl's `low_var_kl+`."""
    return _straight_through(low_var, logp, ref_logp)


def _straight_through(value: KLPenalty, logp: Tensor, ref_logp: Tensor) -> Tensor:
    slope = k2(logp, ref_logp)
    return value(logp.detach(), ref_logp) + (slope - slope.detach())


def penalty_of(name: str) -> KLPenalty:
    """Returns the penalty of that name, whose result is checked when it is tried here and whenever it is called.

    Raises UnknownName, and ConfigError for a penalty that does not return a number for each token.
    """
    function = KL_PENALTIES[name]

    def call_penalty(logp: Tensor, ref_logp: Tensor) -> Tensor:
        with convert_function_errors(f"the KL penalty {name!r}", function):
            penalty: object = function(logp, ref_logp)
        if not isinstance(penalty, Tensor) or penalty.shape != logp.shape:
            found_kind = f"shape {tuple(penalty.shape)}" if isinstance(penalty, Tensor) else type(penalty).__name__
            raise ConfigError(
                f"KL penalty {name!r} gives {found_kind}, and a number for each token, {tuple(logp.shape)}, was wanted"
            )
        return penalty

    call_penalty(torch.full((2,), -1.0), torch.full((2,), -2.0))
    return call_penalty
