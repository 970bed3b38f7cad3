"""The logprobs and entropies of logits on a GPU, and the derivatives by logits: a Triton kernel in either direction.

Torch's operators convert the logits to float32 and read or write them about twenty times. Here they stay in the model's
type, are read once forward, and read and overwritten once backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["normalize", "overwrite_by_slopes"]

# Shape suffixes: C tokens of a chunk, V vocabulary.

_BLOCK = 4096


def normalize(
    logits_CV: Tensor, target_C: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logprobs of the targets, the entropies, and the logarithms of the sums of exponentials, float32.

    With a soft cap, the logits are `softcap * tanh(logits / softcap)`, and divided by the temperature then.
    """
    num_rows, width = logits_CV.shape
    logp_C, entropy_C, total_C = torch.empty(3, num_rows, device=logits_CV.device)
    if num_rows:
        _normalize_kernel[(num_rows,)](
            *(logits_CV, target_C, logp_C, entropy_C, total_C, width, 1 / temperature, softcap or 1.0),
            CAPS=softcap is not None,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return logp_C, entropy_C, total_C


def overwrite_by_slopes(
    logits_CV: Tensor,
    target_C: Tensor,
    scores: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Overwrites logits by the derivatives of the loss by them, and returns these.

    `scores` are entropies and the logarithms of the sums, `grads` the derivatives by logprobs and entropies.
    """
    num_rows, width = logits_CV.shape
    grad_logp_C, grad_entropy_C = (None if grad_C is None else grad_C.contiguous() for grad_C in grads)
    if num_rows:
        _slope_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
            *(logits_CV, target_C, *scores, grad_logp_C, grad_logp_C if grad_entropy_C is None else grad_entropy_C),
            *(width, 1 / temperature, softcap or 1.0),
            CAPS=softcap is not None,
            HAS_ENTROPY=grad_entropy_C is not None,
            BLOCK=_BLOCK,
        )
    return logits_CV


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]
def _normalize_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913  # kernels take no objects
    logits, target, logp, entropy, total, width, scale, cap, CAPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * width
    column = tl.arange(0, BLOCK)
    max_logit = tl.full([BLOCK], float("-inf"), tl.float32)  # of each lane; all of them meet at the end
    total_B, product_B = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        z = tl.load(base + start + column, inside, 0.0).to(tl.float32)
        if CAPS:
            z = cap * _tanh(z / cap)
        z = tl.where(inside, z * scale, float("-inf"))
        higher = tl.maximum(max_logit, z)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        before, now = tl.exp(max_logit - shift), tl.exp(z - shift)
        total_B = total_B * before + now
        product_B = product_B * before + tl.where(now > 0, now * z, 0.0)
        max_logit = higher
    peak = tl.max(max_logit, 0)
    factor = tl.exp(max_logit - peak)
    summed = tl.sum(total_B * factor, 0)
    log_total = peak + tl.log(summed)
    target_logit = tl.load(base + tl.load(target + row)).to(tl.float32)
    if CAPS:
        target_logit = cap * _tanh(target_logit / cap)
    tl.store(logp + row, target_logit * scale - log_total)
    tl.store(entropy + row, log_total - tl.sum(product_B * factor, 0) / summed)
    tl.store(total + row, log_total)


@triton.jit  # type: ignore[untyped-decorator]
def _slope_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913  # kernels take no objects
    logits, target, entropy, total, grad_logp, grad_entropy, width, scale, cap,
    CAPS: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, pointer = column < width, logits + row * width + column
    z = tl.load(pointer, inside, 0.0).to(tl.float32)
    bend = tl.zeros([BLOCK], tl.float32)
    if CAPS:
        bend = _tanh(z / cap)
        z = cap * bend
    log_p = z * scale - tl.load(total + row)
    p = tl.exp(log_p)
    grad = tl.load(grad_logp + row) * scale
    slope = tl.where(column == tl.load(target + row), grad, 0.0) - grad * p
    if HAS_ENTROPY:
        slope -= tl.load(grad_entropy + row) * scale * tl.where(p > 0, p * (log_p + tl.load(entropy + row)), 0.0)
    if CAPS:
        slope *= 1 - bend * bend
    tl.store(pointer, slope, inside)
