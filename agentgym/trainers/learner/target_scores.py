"""The logprob and entropy of each target token."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["TargetScores"]


class TargetScores(NamedTuple):  # a tuple: FSDP finds the tensors that a sharded model gives only in containers
    """What the policy says of each target: both differentiable, natural logarithm, of the tempered distribution."""

    logp_N: Tensor
    entropy_N: Tensor
