"""The shape of a model, counted on the meta device, where its weights take no memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from agentgym.model.policy import empty_policy
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.parallel.expert_split import expert_stacks, find_experts
from agentgym.trainers.planning.shapes import Experts, ModelShape

__all__ = ["counted_shape"]

NUMBER = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
HEAD_WIDTH = ("qk_head_dim", "head_dim")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_dim")


def counted_shape(folder: Path, reason: str) -> ModelShape:
    """Returns the shape of the model in a folder; `reason` is why the fast decoder does not compute it, or empty.

    Models that the fast decoder computes are made by transformers too: they have the same weights. Raises ConfigError
    or RunFolderError for a folder whose model transformers does not make.
    """
    model: Any = empty_policy(folder, backend="transformers")
    settings = model.hf.config.get_text_config()
    heads = int(getattr(settings, "num_attention_heads", 0) or 1)
    is_latent = bool(getattr(settings, "kv_lora_rank", None))
    kv_heads = heads if is_latent else int(getattr(settings, "num_key_value_heads", 0) or heads)
    head_width = _first(settings, HEAD_WIDTH) or model.width // heads
    every = {parameter: parameter.numel() for parameter in model.parameters()}
    blocks = [dict.fromkeys(block.parameters()) for block in model.blocks]
    inside = {parameter for block in blocks for parameter in block}
    stacks = {stack for module in find_experts(model) for stack in expert_stacks(module)}
    matrices = [weight for weight in inside if weight.ndim >= 2 and weight.shape[-2] > 1]  # others are of convolutions
    return ModelShape(
        name=folder.name,
        vocab_size=model.vocab_size,
        width=model.width,
        num_layers=model.num_layers,
        num_kv_heads=kv_heads,
        q_width=heads * head_width,
        kv_width=kv_heads * head_width,
        ffn_width=_first(settings, ("intermediate_size", "ffn_dim")) or 4 * model.width,
        qk_norm=any("q_norm" in name for name, _ in model.named_modules()),
        experts=_experts(settings, model.width),
        refusal=reason,
        num_parameters=sum(every.values()),
        layer_parameters=max(sum(every[parameter] for parameter in block) for block in blocks),
        head_parameters=sum(size for parameter, size in every.items() if parameter not in inside),
        matrix_parameters=sum(every[matrix] for matrix in matrices),
        layer_experts=max(sum(every[parameter] for parameter in block if parameter in stacks) for block in blocks),
        all_experts=sum(every[stack] for stack in stacks),
        kv_floats=_num_attentions(settings) * _kv_numbers(settings, 2 * kv_heads * head_width),
        adapters=_count_adapters(model),
    )


def _num_attentions(settings: Any) -> int:
    """Returns the number of layers that keep keys and values; the others of a hybrid keep a state."""
    if not getattr(settings, "num_attention_heads", None):
        return 0
    kinds = getattr(settings, "layer_types", None) or getattr(settings, "layers_block_type", None)
    number = int(settings.num_hidden_layers)
    return number if not kinds else sum("attention" in kind and "linear" not in kind for kind in kinds)


def _kv_numbers(settings: Any, usual: int) -> int:
    """Returns the numbers that an engine caches of a token in a layer: with latent attention one vector for all."""
    latent = getattr(settings, "kv_lora_rank", None)
    return usual if not latent else int(latent) + int(settings.qk_rope_head_dim)


def _experts(settings: Any, model_width: int) -> Experts | None:
    number, chosen = _first(settings, NUMBER), _first(settings, CHOSEN)
    if not number or not chosen:
        return None
    width = _first(settings, EXPERT_WIDTH) or model_width
    shared = int(getattr(settings, "shared_expert_intermediate_size", 0) or 0)
    shared = shared or width * int(getattr(settings, "n_shared_experts", 0) or 0)
    return Experts(number=number, chosen=chosen, width=width, shared_width=shared)


def _first(settings: Any, names: tuple[str, ...]) -> int | None:
    """Returns the first of these settings that is a number above 0; None if none is."""
    values = (getattr(settings, name, None) for name in names)
    return next((number for number in values if isinstance(number, int) and number > 0), None)


def _count_adapters(model: TransformersModel) -> Counter[str]:
    """Returns the weights of adapters of rank 1 by the published name of what they adapt; the model keeps them."""
    with torch.device("meta"):
        model.adapt(None, rank=1, scale=1.0)
    counts: Counter[str] = Counter()
    for weight in model.adapted_weights():
        for name, adapter in weight.adapters.items():
            if adapter is not None:
                counts[name.rpartition(".")[2]] += adapter.A_RI.numel() + adapter.B_OR.numel()
    return counts
