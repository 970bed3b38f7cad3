"""The check that the weights are finite after a step."""

from __future__ import annotations

from torch import Tensor

from agentgym.errors import TrainingHalted

__all__ = ["NotFinite", "check_finite"]


class NotFinite(TrainingHalted):
    """A loss, a gradient, or the weights after the step are not finite."""


def check_finite(logp_M: Tensor) -> None:
    """Raises NotFinite if the weights after a step compute logprobs of its own tokens that are not finite."""
    if not bool(logp_M.isfinite().all()):
        raise NotFinite(
            "the step made weights whose logprobs are not finite, so they are lost; lower the learning rate"
        )
