"""The check that a step left finite weights."""

from __future__ import annotations

from torch import Tensor

from agentgym.errors import TrainingHalted

__all__ = ["NotFinite", "check_finite"]


class NotFinite(TrainingHalted):
    """A loss, a gradient, or what the step made of the weights is not finite."""


def check_finite(logp_M: Tensor) -> None:
    """Raises NotFinite when a step left weights whose logprobs of its own tokens are no numbers."""
    if not bool(logp_M.isfinite().all()):
        raise NotFinite(
            "the step made weights whose logprobs are not finite, so they are lost; lower the learning rate"
        )
