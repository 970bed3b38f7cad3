"""Logprobs and entropies of target tokens from hidden states; `[tokens x vocabulary]` is never held whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.extras import install_extra
from agentgym.model.linear import linear, padded_size, weight_gradient
from agentgym.trainers.learner.target_scores import TargetScores
from agentgym.trainers.settings.learner import HeadKernel

__all__ = ["gradient_proxy", "score_targets", "scorer"]

Scorer = Callable[[Tensor, Tensor, Tensor, float], "TargetScores"]
"""A function of final states `[N, E]`, the head `[V, E]`, targets `[N]` and a temperature."""

# Shape suffixes: N tokens, E model width, V vocabulary.

CHUNK_LOGITS = 4_000_000
"""Logits held at once (16 MB in fp32) on CPU; the chunk of tokens follows from the vocabulary."""

GPU_CHUNK_LOGITS = 256_000_000
"""Logits held at once on a GPU (1 GB): each chunk sums its gradient to the whole head's, so few are fast."""

LARGE_VOCABULARY = 8_192
"""The vocabulary size above which the head's gradient is summed in place: a second copy takes memory and time."""

MAX_ROWS = 512
"""Rows of a chunk on CPU whose logits are more than CHUNK_LOGITS, if the model is as wide: each chunk reads the whole
head and sums its whole gradient, so few rows cost more for that than for their products."""

_BLOCK_ROWS = 128
_BLOCK_LOGITS = 1 << 18  # 1 MB, which stays in a processor's cache


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
            f"learner.head_kernel liger needs Liger ({error}): {install_extra('liger')}, or leave it out"
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
    proxy_N = torch.empty(len(target_N), device=hidden_NE.device)
    for part in _chunks(target_N, head_VE):
        p_CV = _logits(hidden_NE[part], head_VE, temperature or 1.0, softcap).softmax(-1)
        target_C = p_CV.gather(1, target_N[part, None])[:, 0]
        proxy_N[part] = 1 - 2 * target_C + p_CV.square().sum(-1)
    return proxy_N


class _ScoreTargets(torch.autograd.Function):
    """d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, head_VE: Tensor, target_N: Tensor, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        logp_N = torch.empty(len(target_N), device=hidden_NE.device)
        entropy_N, total_N = torch.empty_like(logp_N), torch.empty_like(logp_N)
        last_CV = hidden_NE.new_empty(0)
        kernels = _kernels(hidden_NE)
        for part in _chunks(target_N, head_VE):
            if kernels:
                last_CV = linear(hidden_NE[part], head_VE)
                outputs = kernels.normalize(last_CV, target_N[part], temperature, softcap)
                logp_N[part], entropy_N[part], total_N[part] = outputs
            else:
                last_CV = _logits(hidden_NE[part], head_VE, temperature, softcap)
                logp_N[part], entropy_N[part] = _normalize(last_CV, target_N[part])
        ctx.save_for_backward(hidden_NE, head_VE, target_N, entropy_N, total_N)
        ctx.set_materialize_grads(False)  # no gradient of the entropies is known by that, without a look at its numbers
        ctx.temperature, ctx.softcap, ctx.kernels = temperature, softcap, kernels
        # Logits for a kernel, probabilities without one; with a cap the logits are needed again too.
        ctx.last_CV = last_CV if kernels or softcap is None else None
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_NE, head_VE, target_N, entropy_N, total_N = ctx.saved_tensors
        grad_logp_N, grad_entropy_N = grads
        grad_logp_N = torch.zeros_like(entropy_N) if grad_logp_N is None else grad_logp_N
        grad_hidden_NE = torch.empty_like(hidden_NE)
        grad_head_VE = None
        for part in reversed(_chunks(target_N, head_VE)):
            last_CV, ctx.last_CV = ctx.last_CV, None
            grad_entropy_C = None if grad_entropy_N is None else grad_entropy_N[part]
            if ctx.kernels:
                logits_CV = linear(hidden_NE[part], head_VE) if last_CV is None else last_CV
                scores, part_grads = (entropy_N[part], total_N[part]), (grad_logp_N[part], grad_entropy_C)
                how = (ctx.temperature, ctx.softcap)
                grad_CV = ctx.kernels.overwrite_by_slopes(logits_CV, target_N[part], scores, part_grads, *how)
            else:
                p_CV = _logits(hidden_NE[part], head_VE, ctx.temperature, ctx.softcap) if last_CV is None else last_CV
                sloped = _Slopes(target_N[part], entropy_N[part], grad_logp_N[part], grad_entropy_C)
                grad_CV = sloped.by_logits(p_CV, ctx.temperature, ctx.softcap, last_CV is None).to(hidden_NE.dtype)
            grad_hidden_NE[part] = linear(grad_CV, head_VE.T)
            if ctx.needs_input_grad[1]:  # a frozen head has no gradient
                grad_head_VE = _add_product(grad_head_VE, grad_CV, hidden_NE[part])
        if ctx.needs_input_grad[1] and grad_head_VE is None:
            grad_head_VE = torch.zeros_like(head_VE)
        return grad_hidden_NE, None if grad_head_VE is None else grad_head_VE.to(head_VE.dtype), None, None, None


def _kernels(x: Tensor) -> Any:
    """Returns the module of the kernels for a GPU; None where they do not run."""
    has_kernels = x.is_cuda and find_spec("triton") is not None
    return import_module("agentgym.model.ops.gpu_head") if has_kernels else None


class _Slopes(NamedTuple):
    """Targets and entropies of the rows of a chunk, and the derivatives of the loss by their logprobs and entropies."""

    target_C: Tensor
    entropy_C: Tensor
    grad_logp_C: Tensor
    grad_entropy_C: Tensor | None

    def by_logits(self, p_CV: Tensor, temperature: float, softcap: float | None, is_logits: bool) -> Tensor:
        """Turns probabilities, or logits that `is_logits` announces, into the loss's derivatives by raw logits."""
        for block in _blocks(p_CV):
            p_BV, slope_BV = p_CV[block], None  # of capped logits by raw ones
            if is_logits and softcap is not None:
                slope_BV = 1 - (p_BV * (temperature / softcap)).square()
            if is_logits:
                p_BV.copy_(p_BV.softmax(-1))
            grad_B1 = self.grad_logp_C[block, None] / temperature
            if self.grad_entropy_C is None:
                p_BV.mul_(-grad_B1)
            else:  # -p (log p + entropy), written so that it is 0 where p is 0
                extra_BV = torch.special.entr(p_BV) - p_BV * self.entropy_C[block, None]
                p_BV.mul_(-grad_B1).addcmul_(extra_BV, self.grad_entropy_C[block, None] / temperature)
            p_BV.scatter_add_(1, self.target_C[block, None], grad_B1)
            if slope_BV is not None:
                p_BV.mul_(slope_BV)
        return p_CV


def _add_product(total_VE: Tensor | None, grad_CV: Tensor, hidden_CE: Tensor) -> Tensor:
    """Returns the head's gradient so far plus that of a chunk; a sum is float32, since bfloat16 would lose some."""
    in_place = grad_CV.shape[1] > LARGE_VOCABULARY
    if total_VE is None:
        return grad_CV.T @ hidden_CE if in_place else weight_gradient(grad_CV, hidden_CE)
    total_VE = total_VE.to(torch.promote_types(total_VE.dtype, torch.float32))
    if in_place and grad_CV.dtype == total_VE.dtype:
        return total_VE.addmm_(grad_CV.T, hidden_CE)
    return total_VE.add_(weight_gradient(grad_CV, hidden_CE))


def _chunks(target_N: Tensor, head_VE: Tensor) -> list[slice]:
    vocab_size, width = head_VE.shape
    if target_N.device.type == "cpu":
        size = max(1, CHUNK_LOGITS // vocab_size, min(MAX_ROWS, width))
    else:
        size = max(1, GPU_CHUNK_LOGITS // vocab_size)
    size -= size % _BLOCK_ROWS if size > _BLOCK_ROWS else 0
    return [slice(start, start + size) for start in range(0, len(target_N), size)]


def _blocks(logits_CV: Tensor) -> list[slice]:
    """Returns the rows of logits in blocks that stay in the caches of torch's threads, or at once on a GPU."""
    num_rows, vocab_size = logits_CV.shape
    is_cpu = logits_CV.device.type == "cpu"
    threads = 1 << (torch.get_num_threads() - 1).bit_length()  # each has rows: parts of one would have other bits
    size = threads * min(_BLOCK_ROWS, max(1, _BLOCK_LOGITS // vocab_size)) if is_cpu else max(1, num_rows)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _logits(hidden_CE: Tensor, head_VE: Tensor, temperature: float, softcap: float | None) -> Tensor:
    logits_CV = linear(hidden_CE, head_VE).float()
    if softcap is not None:
        logits_CV = logits_CV.div_(softcap).tanh_().mul_(softcap)
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _normalize(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
    """Turns logits into probabilities in place; returns the logprob of each target, and the entropies."""
    logp_C, entropy_C = torch.empty_like(logits_CV[:, 0]), torch.empty_like(logits_CV[:, 0])
    for block in _blocks(logits_CV):
        log_p_BV = logits_CV[block].log_softmax(-1)
        logp_C[block] = log_p_BV.gather(1, target_C[block, None])[:, 0]
        p_BV = torch.exp(log_p_BV, out=logits_CV[block])
        entropy_C[block] = -torch.linalg.vecdot(p_BV, log_p_BV)
    return logp_C, entropy_C
