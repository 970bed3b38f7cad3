"""The contract and the table of the policy losses, and the statistics of how far a policy moved.

The contract of an entry of `LOSSES`: `name(logp, old_logp, advantages, mask, *, sequences=None, <settings>)`.

`logp`, `old_logp`: the sampled tokens' logprobs (natural logarithm) under the trained policy and under the one that the
ratio is taken against. `advantages`: one number per token. `mask`: bool, True where a token is trained. All have one
shape, packed `[N]` or padded `[B, T]`. `sequences`: int64, the number of every token's trajectory, for losses with a
ratio per sequence; `[B, T]` has its rows as a default. The result is a loss per token, which an aggregation weighs and
sums. `logp` alone carries gradient; outside of `mask` loss and gradient are exactly 0 whatever the numbers there are,
NaN included. Settings are keywords with the published defaults, and raise ConfigError where they cannot work. The
bundled losses are written as `(tokens, *, <settings>)` over `Tokens`, and `bundled_loss` gives them this signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.registry import Registry
from agentgym.settings.functions import Contract, convert_function_errors, is_bundled, with_inputs, with_settings
from agentgym.trainers.algorithms.kl import MAX_LOG_RATIO, k3
from agentgym.trainers.algorithms.losses.pair_sums import PairSums

__all__ = [
    "LOSSES",
    "LossStats",
    "PolicyLoss",
    "PolicyLossFn",
    "Tokens",
    "bundled_loss",
    "check_shapes",
    "is_elementwise",
    "is_silent_at_zero",
    "loss_stats",
    "loss_with",
    "require",
    "traits",
    "traits_of",
]


@dataclass(frozen=True, eq=False)
class LossStats:
    """Sums over trained tokens, so that micro-batches and ranks add up: `total = first + second`.

    The fields are scalar tensors on the loss's device (reading a property waits for it); the properties are means,
    0 when there was no token.
    """

    num_tokens: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    kl_sum: Tensor

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(
            num_tokens=self.num_tokens + other.num_tokens,
            clipped=self.clipped + other.clipped,
            dual_clipped=self.dual_clipped + other.dual_clipped,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            kl_sum=self.kl_sum + other.kl_sum,
        )

    @property
    def nothing(self) -> LossStats:
        """The statistics of no token, on the same device."""
        return LossStats(**{field.name: torch.zeros_like(getattr(self, field.name)) for field in fields(self)})

    @property
    def clip_fraction(self) -> float:
        """The share of trained tokens whose gradient or weight a bound has cut."""
        return self._mean(self.clipped)

    @property
    def dual_clip_fraction(self) -> float:
        """The share of trained tokens without gradient because of the dual clip."""
        return self._mean(self.dual_clipped)

    @property
    def ratio_mean(self) -> float:
        """The mean importance ratio of a token; 1 to rounding on the first minibatch that this policy sampled."""
        return self._mean(self.ratio_sum)

    @property
    def approx_kl(self) -> float:
        """KL(old policy || policy) in nats a token, by the `k3` estimate; never negative."""
        return self._mean(self.kl_sum)

    def _mean(self, total: Tensor) -> float:
        return float(total / self.num_tokens.clamp(min=1))


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """A loss per token, to be weighted and summed, with its statistics (which carry no gradient)."""

    loss: Tensor
    """The loss of each token, of the shape and type of `logp`; 0 outside of the mask."""
    stats: LossStats
    pairs: PairSums | None = None
    """The sums over pairs of replies, of a loss that compares them."""


PolicyLossFn: TypeAlias = Callable[..., PolicyLoss]
"""`(logp, old_logp, advantages, mask, *, sequences=None, <settings>) -> PolicyLoss`, see the module."""

LOSSES: Registry[PolicyLossFn] = Registry(
    "policy loss",
    "`agentgym algorithms list` shows all, `agentgym new algorithm NAME --kind loss` writes one to start from.",
    check=Contract("policy loss", ("logp", "old_logp", "advantages", "mask"), keywords=("sequences",)).check,
)
"""Every policy loss by name; `LOSSES.register(name)` adds one, and `path/to/file.py:name` is one of a file."""

F = TypeVar("F", bound=PolicyLossFn)


@dataclass(frozen=True)
class Traits:
    """The properties of a loss, see `traits`."""

    elementwise: bool = False
    silent_at_zero: bool = False
    within_trajectory: bool = False
    against_reference: bool = False


def traits(
    *,
    elementwise: bool = False,
    silent_at_zero: bool = False,
    within_trajectory: bool = False,
    against_reference: bool = False,
) -> Callable[[F], F]:
    """Declares properties of a loss that the learner may rely on; the default, none, is always right and costs more.

    `elementwise`: a token's loss depends on that token alone, so a step may be cut into micro-batches as it is; any
    other loss is computed over the whole step first. `within_trajectory`: it depends on the tokens of its trajectory,
    whose rows then stay in one micro-batch. `against_reference`: `old_logp` is that of the first weights.
    `silent_at_zero`: a trajectory whose advantages are all 0 has no gradient and changes no other's, so it may be left
    out of the step.
    """

    def mark(loss: F) -> F:
        vars(loss).update(traits=Traits(elementwise, silent_at_zero, within_trajectory, against_reference))
        return loss

    return mark


def traits_of(loss: PolicyLossFn) -> Traits:
    """Returns the declared properties of a loss."""
    declared: Traits = getattr(loss, "traits", Traits())
    return declared


def is_elementwise(loss: PolicyLossFn) -> bool:
    """True if a token's loss depends on that token alone (see `traits`)."""
    return traits_of(loss).elementwise


def is_silent_at_zero(loss: PolicyLossFn) -> bool:
    """True if a trajectory whose advantages are all 0 may be left out (see `traits`)."""
    return traits_of(loss).silent_at_zero


def loss_with(name: str, settings: Mapping[str, object]) -> PolicyLossFn:
    """Returns the loss with its settings, tried on a few tokens; each call of a user's loss checks inputs and result.

    Raises UnknownName for a loss that does not exist, ConfigError for one that does not return its tokens' losses, or
    for a setting that it does not have, of another type than the setting's, or out of its bounds.
    """
    function = LOSSES[name]
    bound = with_settings(name, function, settings, ("sequences",))

    def call_loss(
        logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, sequences: Tensor | None = None
    ) -> PolicyLoss:
        check_shapes(mask, logp=logp, old_logp=old_logp, advantages=advantages)
        with convert_function_errors(f"the policy loss {name!r}", function):
            result = bound(logp, old_logp, advantages, mask, sequences=sequences)
        _check_result(name, result, logp)
        return result

    with torch.enable_grad():
        logp, gain = torch.full((4,), -1.0, requires_grad=True), torch.tensor([1.0, -1.0, 0.5, -0.5])
        sequences = torch.tensor([0, 0, 1, 1])
        result = call_loss(logp, logp.detach(), gain, torch.ones(4, dtype=torch.bool), sequences=sequences)
    if not result.loss.requires_grad:
        raise ConfigError(f"policy loss {name!r} gives a loss without gradient: it must follow from logp, undetached")
    return bound if is_bundled(function) else call_loss


def _check_result(name: str, result: object, logp: Tensor) -> None:
    """Raises ConfigError for a result that is not a PolicyLoss with one number for each token."""
    if not isinstance(result, PolicyLoss):
        raise ConfigError(
            f"policy loss {name!r} gives a {type(result).__name__}, and PolicyLoss(loss, loss_stats(tokens)) was wanted"
        )
    if result.loss.shape != logp.shape:
        raise ConfigError(
            f"policy loss {name!r} gives a loss of shape {tuple(result.loss.shape)}, and one number for each token, "
            f"{tuple(logp.shape)}, was wanted: an aggregation sums them"
        )


def require(holds: bool, setting: str, value: object, condition: str) -> None:
    """Raises ConfigError unless `holds`: `<setting> is <value>; it must <wanted>`."""
    if not holds:
        raise ConfigError(f"{setting} is {value}; it must {condition}")


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Raises InvalidTrajectory for tensors that are not of the mask's shape, or a mask that is not bool."""
    shapes = [tuple(tensor.shape) for tensor in (*tensors.values(), mask)]
    if len(set(shapes)) > 1 or mask.dtype != torch.bool:
        raise InvalidTrajectory(
            f"{', '.join(tensors)} and mask have one shape, and the mask is bool (`mask.bool()` of 0 and 1); got "
            f"{', '.join(map(str, shapes))} and {mask.dtype}"
        )


@dataclass(frozen=True, eq=False)
class Tokens:
    """The inputs of a loss, with 0 for everything outside of the mask, so that nothing there reaches a result."""

    logp: Tensor
    """The logprobs, with gradient, as are the three fields below that are computed from them."""
    difference: Tensor
    """`logp - old_logp`, not clamped."""
    log_ratio: Tensor
    """The difference, clamped to `MAX_LOG_RATIO` either way."""
    ratio: Tensor
    """`exp(log_ratio)`; 1 outside of the mask."""
    old_logp: Tensor
    gain: Tensor
    """The advantages."""
    mask: Tensor
    sequences: Tensor | None = None
    """The number of every token's trajectory, see the module."""

    @classmethod
    def of(
        cls, logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, sequences: Tensor | None = None
    ) -> Tokens:
        """Masks the inputs; raises InvalidTrajectory for tensors of different shapes, or a mask that is not bool."""
        check_shapes(mask, logp=logp, old_logp=old_logp, advantages=advantages)
        old, gain = old_logp.detach(), advantages.detach()
        difference = torch.where(mask, (logp - old).to(logp.dtype), 0.0)
        log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return cls(
            logp=torch.where(mask, logp, 0.0),
            difference=difference,
            log_ratio=log_ratio,
            ratio=log_ratio.exp(),
            old_logp=torch.where(mask, old.to(logp.dtype), 0.0),
            gain=torch.where(mask, gain.to(logp.dtype), 0.0),
            mask=mask,
            sequences=sequences,
        )


def bundled_loss(name: str, **properties: bool) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Registers a loss of `(tokens, *, <settings>)` as an entry of `LOSSES`, with its properties (see `traits`)."""
    mark = traits(**properties)
    return lambda loss: LOSSES.add(name, mark(with_inputs(loss, Tokens.of)))


@torch.no_grad()
def loss_stats(tokens: Tokens, clipped: Tensor | None = None, dual_clipped: Tensor | None = None) -> LossStats:
    """The statistics of a loss; `clipped` and `dual_clipped` are bool per token, None for none."""
    mask, nothing = tokens.mask, torch.zeros_like(tokens.mask)
    ratio = torch.where(mask, tokens.ratio, 0.0)
    return LossStats(
        num_tokens=mask.sum(),
        clipped=(nothing if clipped is None else clipped & mask).sum(),
        dual_clipped=(nothing if dual_clipped is None else dual_clipped & mask).sum(),
        ratio_sum=ratio.sum(),
        ratio_max=ratio.max() if ratio.numel() else ratio.sum(),
        kl_sum=k3(torch.zeros_like(tokens.log_ratio), tokens.log_ratio).sum(),
    )
