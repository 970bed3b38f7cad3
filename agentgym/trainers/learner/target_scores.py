"""The logprob and entropy of each target token."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["TargetScores"]


class TargetScores(NamedTuple):  # a tuple: FSDP finds tensors in a sharded model's output only in containers
    """The logprob and entropy of each target: both differentiable, natural logarithm, of the tempered distribution."""

    logp_N: Tensor
    entropy_N: Tensor
