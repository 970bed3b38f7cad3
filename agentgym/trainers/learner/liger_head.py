"""Logprobs and entropies by Liger's fused linear cross-entropy, in place of `score_targets`.

On a Hopper GPU with `nvidia-cutlass-dsl` installed it is one kernel that never writes the logits to memory; elsewhere
Liger computes chunks in PyTorch.
"""

from __future__ import annotations

import torch
from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainers.learner.target_scores import TargetScores

__all__ = ["score_targets_by_liger"]

HOPPER = (9, 0)


def score_targets_by_liger(
    hidden_NE: Tensor, head_VE: Tensor, target_N: Tensor, temperature: float = 1.0
) -> TargetScores:
    """Scores targets as `score_targets` does.

    Raises ConfigError if this GPU's kernel misses a library, or takes another type.
    """
    if not len(target_N):  # which Liger refuses
        nothing_N = hidden_NE.sum(-1).float()
        return TargetScores(nothing_N, nothing_N.clone())
    if hidden_NE.dtype != torch.bfloat16 and _is_on_hopper(hidden_NE):
        raise ConfigError(
            f"Liger's kernel for Hopper GPUs takes bfloat16, and the model is {hidden_NE.dtype}: give learner.dtype"
            " bfloat16, or leave learner.head_kernel out"
        )
    try:
        nll_N, entropy_N = LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden_NE, head_VE, target_N, temperature or 1.0, return_entropy=True
        )
    except ImportError as error:  # on Hopper GPUs it asks for its compiler when it is called
        raise ConfigError(
            "Liger's kernel for Hopper GPUs needs NVIDIA's CuTe DSL: pip install nvidia-cutlass-dsl, or leave"
            " learner.head_kernel out"
        ) from error
    return TargetScores(-nll_N, entropy_N.float())


def _is_on_hopper(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) == HOPPER
