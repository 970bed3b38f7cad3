"""Logprobs and entropies of target tokens from hidden states; `[tokens x vocabulary]` is never held whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.model.linear import linear, padded_size, weight_gradient
from agentgym.trainers.learner.target_scores import TargetScores
from agentgym.trainers.settings.learner import HeadKernel

__all__ = ["gradient_proxy", "score_targets", "scorer"]

Scorer = Callable[[Tensor, Tensor, Tensor, float], "TargetScores"]
"""A function of final states `[N, E]`, the head `[V, E]`, targets `[N]` and a temperature."""

# Shape suffixes: N tokens, E model width, V vocabulary.

CHUNK_LOGITS = 4_000_000
"""Logits held at once (16 MB in fp32) on CPU; the chunk of tokens follows from the vocabulary."""

GPU_CHUNK_LOGITS = 64_000_000
"""Logits held at once on a GPU (256 MB): smaller matrix products would leave most of it idle."""

LARGE_VOCABULARY = 65_536
"""The vocabulary size above which the head's gradient is summed in place, since a second copy takes too much memory."""

_BLOCK_ROWS = 128


def scorer(kernel: HeadKernel, softcap: float | None = None) -> Scorer:
    """Returns the function that computes logprobs and entropies: `score_targets`, or the same by Liger's kernel.

    Raises ConfigError if Liger is not installed.
    """
    if kernel == "torch":
        return score_targets if softcap is None else partial(score_targets, softcap=softcap)
    try:
        wrapper = import_module("agentgym.trainers.learner.liger_head")
    except ImportError as error:
        raise ConfigError(
            f"learner.head_kernel liger needs Liger ({error}): pip install 'agentgym-llm[liger]', or leave it out"
        ) from error
    return cast(Scorer, wrapper.score_targets_by_liger)


def score_targets(
    hidden_NE: Tensor, head_VE: Tensor, target_N: Tensor, temperature: float = 1.0, *, softcap: float | None = None
) -> TargetScores:
    """The logprob of each target and the entropy of each distribution under `softmax(hidden @ head.T / temperature)`.

    With a soft cap, the logits before the temperature are `softcap * tanh(hidden @ head.T / softcap)`.

    The logits are computed chunk by chunk, in the backward pass once more (except for the last chunk, whose
    probabilities are kept), and in fp32 whatever the model's dtype is.
    `temperature` is the sampling temperature, so that logprobs compare with those of the engine (0 counts as 1).
    """
    num_tokens = len(target_N)
    padding = padded_size(num_tokens) - num_tokens  # few sizes: oneDNN keeps a kernel for each
    hidden_NE, target_N = F.pad(hidden_NE, (0, 0, 0, padding)), F.pad(target_N, (0, padding))
    logp_N, entropy_N = _ScoreTargets.apply(hidden_NE, head_VE, target_N, temperature or 1.0, softcap)  # type: ignore[no-untyped-call]
    # Copies, not views: FSDP attaches its backward hook to a sharded model's output.
    return TargetScores(logp_N[:num_tokens].clone(), entropy_N[:num_tokens].clone())


@torch.no_grad()
def gradient_proxy(
    hidden_NE: Tensor, head_VE: Tensor, target_N: Tensor, temperature: float = 1.0, *, softcap: float | None = None
) -> Tensor:
    """`1 - 2 p + sum p^2`, `[N]`, in [0, 2]: the squared norm of the gradient of each target's logprob by the logits.

    Li et al. 2026 (The Optimal Token Baseline), where it approximates the squared norm of the whole gradient. Arguments
    as in `score_targets`.
    """
    found_N = torch.empty(len(target_N), device=hidden_NE.device)
    for part in _chunks(target_N, len(head_VE)):
        p_CV = _logits(hidden_NE[part], head_VE, temperature or 1.0, softcap).softmax(-1)
        target_C = p_CV.gather(1, target_N[part, None])[:, 0]
        found_N[part] = 1 - 2 * target_C + p_CV.square().sum(-1)
    return found_N


class _ScoreTargets(torch.autograd.Function):
    """d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, head_VE: Tensor, target_N: Tensor, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        logp_N = torch.empty(len(target_N), device=hidden_NE.device)
        entropy_N = torch.empty_like(logp_N)
        p_CV = hidden_NE.new_empty(0)
        for part in _chunks(target_N, len(head_VE)):
            p_CV = _logits(hidden_NE[part], head_VE, temperature, softcap)
            logp_N[part], entropy_N[part] = _normalize(p_CV, target_N[part])
        ctx.save_for_backward(hidden_NE, head_VE, target_N, entropy_N)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.last_p_CV = p_CV if softcap is None else None  # with a cap the logits are needed again too
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_NE, head_VE, target_N, entropy_N = ctx.saved_tensors
        grad_logp_N, grad_entropy_N = grads
        grad_hidden_NE = torch.empty_like(hidden_NE)
        # A frozen head has no gradient. There are many chunks, and a sum in bfloat16 would lose some.
        sums = torch.promote_types(head_VE.dtype, torch.float32)
        grad_head_VE = torch.zeros_like(head_VE, dtype=sums) if ctx.needs_input_grad[1] else None
        uses_entropy = bool(grad_entropy_N.any())
        for part in reversed(_chunks(target_N, len(head_VE))):
            p_CV, ctx.last_p_CV = ctx.last_p_CV, None
            slope_CV = None  # of capped logits by raw ones
            if p_CV is None:
                logits_CV = _logits(hidden_NE[part], head_VE, ctx.temperature, ctx.softcap)
                if ctx.softcap is not None:
                    slope_CV = 1 - (logits_CV * (ctx.temperature / ctx.softcap)).square()
                p_CV = logits_CV.softmax(-1)
            # -p (log p + entropy), written so that it is 0 where p is 0
            extra_CV = torch.special.entr(p_CV) - p_CV * entropy_N[part, None] if uses_entropy else None
            grad_CV = p_CV.mul_(-grad_logp_N[part, None])
            if extra_CV is not None:
                grad_CV.addcmul_(extra_CV, grad_entropy_N[part, None])
            grad_CV.scatter_add_(1, target_N[part, None], grad_logp_N[part, None])
            grad_CV = grad_CV.div_(ctx.temperature)
            grad_CV = (grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)).to(hidden_NE.dtype)
            grad_hidden_NE[part] = linear(grad_CV, head_VE.T)
            if grad_head_VE is None:
                continue
            if len(head_VE) > LARGE_VOCABULARY and head_VE.dtype == grad_head_VE.dtype:
                grad_head_VE.addmm_(grad_CV.T, hidden_NE[part])
            else:
                grad_head_VE += weight_gradient(grad_CV, hidden_NE[part])
        return grad_hidden_NE, None if grad_head_VE is None else grad_head_VE.to(head_VE.dtype), None, None, None


def _chunks(target_N: Tensor, vocab_size: int) -> list[slice]:
    most = CHUNK_LOGITS if target_N.device.type == "cpu" else GPU_CHUNK_LOGITS
    size = max(1, most // vocab_size)
    size -= size % _BLOCK_ROWS if size > _BLOCK_ROWS else 0
    return [slice(start, start + size) for start in range(0, len(target_N), size)]


def _logits(hidden_CE: Tensor, head_VE: Tensor, temperature: float, softcap: float | None) -> Tensor:
    logits_CV = linear(hidden_CE, head_VE).float()
    if softcap is not None:
        logits_CV = logits_CV.div_(softcap).tanh_().mul_(softcap)
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _normalize(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
    """Turns logits into probabilities in place; returns the logprob of each target, and the entropies."""
    logp_C, entropy_C = torch.empty_like(logits_CV[:, 0]), torch.empty_like(logits_CV[:, 0])
    size = _BLOCK_ROWS if target_C.device.type == "cpu" else len(target_C)  # blocks that stay in a processor's cache
    for start in range(0, len(target_C), max(1, size)):
        block = slice(start, start + size)
        log_p_BV = logits_CV[block].log_softmax(-1)
        logp_C[block] = log_p_BV.gather(1, target_C[block, None])[:, 0]
        p_BV = torch.exp(log_p_BV, out=logits_CV[block])
        entropy_C[block] = -torch.linalg.vecdot(p_BV, log_p_BV)
    return logp_C, entropy_C
