"""Logprobs and entropies of target tokens from hidden states; `[tokens x vocabulary]` is never held whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agentgym.engines.hf_linear import SIZE_STEP, linear

__all__ = ["TargetScores", "score_targets"]

# Shape suffixes: N tokens, E model width, V vocabulary.

CHUNK_LOGITS = 4_000_000
"""Logits held at once (16 MB in fp32); the chunk of tokens follows from the vocabulary."""


@dataclass(frozen=True, eq=False)
class TargetScores:
    """What the policy says of each target: both differentiable, natural logarithm, of the tempered distribution."""

    logp_N: Tensor
    entropy_N: Tensor


def score_targets(hidden_NE: Tensor, head_VE: Tensor, target_N: Tensor, temperature: float = 1.0) -> TargetScores:
    """Log probability of each target and entropy of each distribution under `softmax(hidden @ head.T / temperature)`.

    The logits are made chunk by chunk, in the backward pass once more, and in fp32 whatever the model's dtype is.
    `temperature` is the sampling temperature, so that logprobs compare with those of the engine (0 counts as 1).
    """
    num_tokens, padding = len(target_N), -len(target_N) % SIZE_STEP  # few sizes: oneDNN keeps a kernel for each
    hidden_NE, target_N = F.pad(hidden_NE, (0, 0, 0, padding)), F.pad(target_N, (0, padding))
    logp_N, entropy_N = _ScoreTargets.apply(hidden_NE, head_VE, target_N, temperature or 1.0)  # type: ignore[no-untyped-call]
    return TargetScores(logp_N[:num_tokens], entropy_N[:num_tokens])


class _ScoreTargets(torch.autograd.Function):
    """d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, head_VE: Tensor, target_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logp_N = torch.empty(len(target_N), device=hidden_NE.device)
        entropy_N = torch.empty_like(logp_N)
        for part in _chunks(len(target_N), len(head_VE)):
            log_p_CV = _logits(hidden_NE[part], head_VE, temperature).log_softmax(-1)
            logp_N[part] = log_p_CV.gather(1, target_N[part, None])[:, 0]
            entropy_N[part] = -torch.einsum("cv,cv->c", log_p_CV.exp(), log_p_CV)
        ctx.save_for_backward(hidden_NE, head_VE, target_N, entropy_N)
        ctx.temperature = temperature
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_NE, head_VE, target_N, entropy_N = ctx.saved_tensors
        grad_logp_N, grad_entropy_N = grads
        grad_hidden_NE, grad_head_VE = torch.empty_like(hidden_NE), torch.zeros_like(head_VE)
        uses_entropy = bool(grad_entropy_N.any())
        for part in _chunks(len(target_N), len(head_VE)):
            logits_CV = _logits(hidden_NE[part], head_VE, ctx.temperature)
            if uses_entropy:
                log_p_CV = logits_CV.log_softmax(-1)
                slope_CV = grad_logp_N[part, None] + grad_entropy_N[part, None] * (log_p_CV + entropy_N[part, None])
                grad_CV = log_p_CV.exp_().mul_(slope_CV).neg_()
            else:
                grad_CV = logits_CV.softmax(-1).mul_(-grad_logp_N[part, None])
            grad_CV.scatter_add_(1, target_N[part, None], grad_logp_N[part, None])
            grad_CV = grad_CV.div_(ctx.temperature).to(hidden_NE.dtype)
            grad_hidden_NE[part] = linear(grad_CV, head_VE.T)
            grad_head_VE += linear(grad_CV.T, hidden_NE[part].T)
        return grad_hidden_NE, grad_head_VE, None, None


def _chunks(num_tokens: int, vocab_size: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocab_size)
    size -= size % SIZE_STEP if size > SIZE_STEP else 0
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _logits(hidden_CE: Tensor, head_VE: Tensor, temperature: float) -> Tensor:
    logits_CV = linear(hidden_CE, head_VE).float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)
