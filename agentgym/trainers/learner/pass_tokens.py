"""The tokens of a forward pass where none are set: as many as the memory of a GPU holds, within bounds."""

from __future__ import annotations

import torch

from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.trainers.settings.learner import CPU_TOKENS

__all__ = ["activation_numbers", "fitting_tokens"]

GPU_TOKENS = 16_384
"""The tokens of the workloads that were measured on a GPU (docs/gpu.md)."""
_ACTIVATION_SHARE = 0.7
"""The share of the memory that activations may take; the rest is for logits, gradients of states and gaps."""


def activation_numbers(model: LanguageModel) -> int:
    """Returns how many numbers a layer keeps of a token for the backward pass, about."""
    if not isinstance(model, Decoder):
        return 40 * model.width
    shape = model.config
    return 12 * shape.width + 4 * shape.ffn_width + 4 * shape.num_heads * shape.head_width


def fitting_tokens(model: LanguageModel, *, recomputes: bool, reserve_bytes: float = 0.0, share: float = 1.0) -> int:
    """Returns the tokens of a forward pass that its activations leave room for: 2,048 to 16,384, and 2,048 on a CPU.

    They get a `share` of the GPU's free memory, without the `reserve_bytes` that others will need.
    """
    device = model.embed.device
    if device.type != "cuda":
        return CPU_TOKENS
    layer = activation_numbers(model)
    numbers = model.num_layers * model.width + 2 * layer if recomputes else model.num_layers * layer
    room = _ACTIVATION_SHARE * share * max(0.0, torch.cuda.mem_get_info(device)[0] - reserve_bytes)
    tokens = int(room / (numbers * model.embed.element_size()))
    return min(GPU_TOKENS, max(CPU_TOKENS, 1 << tokens.bit_length() >> 1))
