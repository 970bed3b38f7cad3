"""The settings of sharded weights, for a learner of several ranks."""

from __future__ import annotations

from typing import Literal

from agentgym.settings.config_class import config_class

__all__ = ["FsdpConfig"]


@config_class
class FsdpConfig:
    """The settings of PyTorch's `fully_shard`; of no effect on a learner in one process."""

    reshard_after_forward: bool = True
    """Frees a layer's whole weights between its forward and its backward pass, so that they are gathered twice per
    micro-batch. Otherwise they are gathered once per optimizer step, however many micro-batches it has, and every rank
    holds a whole model meanwhile."""
    gradients: Literal["whole", "sharded"] = "whole"
    """The gradients that a rank holds between the micro-batches of a step: `whole` ones are exchanged once, after the
    last, and take as much memory as a model in float32; `sharded` ones are exchanged after each."""
    cpu_offload: bool = False
    """Keeps shards of weights, gradients and optimizer in CPU memory while a GPU computes; the process group then has
    both backends, `cpu:gloo,cuda:nccl`."""
