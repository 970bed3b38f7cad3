"""Sampling for the in-process engine: per-request random numbers and vectorized draws with their logprobs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.protocol import Sampling

__all__ = ["draw", "penalize", "uniforms"]

# Shape suffixes: B rows, V vocabulary, T tokens.

# Multiplied by this, a sum gets strictly smaller however it is rounded, so the id found has a probability above zero.
_BELOW_ONE = np.float32(1 - 2**-23)


def uniforms(seed: int, num_tokens: int) -> NDArray[np.float32]:
    """Returns uniform numbers in [0, 1) for tokens 0, 1, ... of a reply, `[T]`; number `t` depends only on `(seed, t)`.

    SplitMix64 (Steele, Lea and Flood 2014); the seed itself is mixed once first, so that neighboring seeds are
    unrelated.
    """
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed & (2**64 - 1)], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        steps_T = np.arange(1, num_tokens + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits_T = _mix(start + steps_T)
    return ((bits_T >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(
    logits_BV: Tensor,
    uniform_B: NDArray[np.float32],
    temperature_B: NDArray[np.float32],
    top_k_B: NDArray[np.int64],
    top_p_B: NDArray[np.float32],
    min_p_B: NDArray[np.float32],
) -> tuple[Tensor, Tensor]:
    """Draws one id per row, with its fp32 logprob under the distribution it was drawn from, `[B]` each.

    Rows of temperature 0 take the greatest logit and report the logprob of temperature 1. Temperature comes first, then
    `top_k_B` (0 is off), then `top_p_B` (1 is off), then `min_p_B` (0 is off); the rest is normalized again. Every row
    is computed from that row alone.
    """
    device, greedy_B = logits_BV.device, temperature_B == 0
    logits_BV = logits_BV.float()
    if (temperature_B != 1).any():
        logits_BV = logits_BV / torch.from_numpy(np.where(greedy_B, np.float32(1), temperature_B)).to(device)[:, None]
    if (top_k_B > 0).any() or (top_p_B < 1).any():
        top_k_B = np.where(greedy_B | (top_k_B == 0), logits_BV.shape[1], top_k_B)
        top_p_B = np.where(greedy_B, np.float32(1), top_p_B)
        logits_BV = _truncate(logits_BV, torch.from_numpy(top_k_B).to(device), torch.from_numpy(top_p_B).to(device))
    p_BV = torch.softmax(logits_BV, -1)
    if (min_p_B > 0).any():
        share_B = torch.from_numpy(np.where(greedy_B, np.float32(0), min_p_B)).to(device)
        p_BV = p_BV.masked_fill(p_BV < p_BV.amax(-1, keepdim=True) * share_B[:, None], 0.0)
        p_BV = p_BV / p_BV.sum(-1, keepdim=True)
    id_B = _inverse_cdf(p_BV, torch.from_numpy(np.minimum(uniform_B, _BELOW_ONE)).to(device))
    if greedy_B.any():
        id_B = torch.where(torch.from_numpy(greedy_B).to(device), logits_BV.argmax(-1), id_B)
    return id_B, p_BV.gather(-1, id_B[:, None])[:, 0].log()


def penalize(logits_V: Tensor, ids_T: NDArray[np.int64], num_prompt: int, penalties: Sampling) -> None:
    """Changes a row's logits by the ids that came before, prompt and reply, of which the first `num_prompt` are prompt.

    `repetition_penalty` (Keskar et al. 2019, CTRL) is about all of them, the others about those of the reply; as
    transformers, vLLM and OpenAI's API have them. They come before the temperature.
    """
    if penalties.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(ids_T)).to(logits_V.device)
        logit_K, penalty = logits_V[seen], penalties.repetition_penalty
        logits_V[seen] = torch.where(logit_K > 0, logit_K / penalty, logit_K * penalty)
    ids, counts = np.unique(ids_T[num_prompt:], return_counts=True)
    if len(ids):
        less_K = penalties.presence_penalty + penalties.frequency_penalty * counts.astype(np.float32)
        logits_V[torch.from_numpy(ids).to(logits_V.device)] -= torch.from_numpy(less_K).to(logits_V)


def _inverse_cdf(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    cdf_BV = p_BV.cumsum(-1)
    target_B1 = (uniform_B * cdf_BV[:, -1])[:, None]
    return torch.searchsorted(cdf_BV, target_B1, right=True)[:, 0].clamp_(max=p_BV.shape[1] - 1)


def _truncate(scaled_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    vocab = scaled_BV.shape[1]
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab, device=scaled_BV.device)
    sorted_BV = sorted_BV.masked_fill(rank_V >= top_k_B[:, None], -torch.inf)
    p_BV = sorted_BV.softmax(-1)
    before_BV = p_BV.cumsum(-1) - p_BV
    drop_BV = (before_BV >= top_p_B[:, None]) & (top_p_B < 1)[:, None] & (rank_V > 0)
    return torch.empty_like(scaled_BV).scatter_(-1, order_BV, sorted_BV.masked_fill(drop_BV, -torch.inf))
