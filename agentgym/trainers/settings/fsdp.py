"""How a learner of several ranks holds its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FsdpConfig"]


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """What PyTorch's `fully_shard` is told; of no effect on a learner in one process."""

    param_dtype: Literal["bfloat16", "float32"] | None = None
    """What forward and backward compute in; the optimizer steps on the weights in their own type. None is their own."""
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """What gradients are summed in, over micro-batches and over ranks."""
    reshard_after_forward: bool = True
    """Whether a layer's whole weights are given up between its forward and its backward pass, and so are gathered
    twice a micro-batch. Without, they are gathered once for an optimizer step, however many micro-batches it has, and
    every rank holds a whole model meanwhile."""
    gradients: Literal["whole", "sharded"] = "whole"
    """What a rank holds of the gradients between the micro-batches of a step: `whole` ones are exchanged once, behind
    the last, and take as much memory as a model in `reduce_dtype`; `sharded` ones are exchanged behind each."""
    cpu_offload: bool = False
    """Whether shards of weights, gradients and optimizer lie in CPU memory while a GPU computes; the process group is
    then one of both, `cpu:gloo,cuda:nccl`."""
