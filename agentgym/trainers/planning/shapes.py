"""Shapes of models: their widths, and the numbers of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentgym.trainers.settings.lora import PROJECTIONS

__all__ = ["Experts", "ModelShape"]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of each layer of a mixture."""

    number: int
    chosen: int
    """The experts that compute a token."""
    width: int
    """The width of an expert's feed-forward."""
    shared_width: int = 0
    """The width of the experts that compute every token, together."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a model that memory follows from.

    Example: of Qwen3-8B `num_parameters` is 8,190,735,360, and `kv_floats` is 73,728.
    """

    name: str
    vocab_size: int
    width: int
    num_layers: int
    num_kv_heads: int
    q_width: int
    """The width of all heads' queries of a token in a layer."""
    kv_width: int
    """The width of all heads' keys of a token in a layer, or of their values."""
    ffn_width: int
    qk_norm: bool
    """True if queries and keys have norms of their own."""
    experts: Experts | None
    refusal: str
    """The reason that the fast decoder does not compute the model, which transformers does then; empty if it does."""
    num_parameters: int
    layer_parameters: int
    """The number of weights of a layer, norms and biases included; of the largest one if layers differ."""
    head_parameters: int
    """The number of weights outside of the layers: embedding, head, last norm."""
    matrix_parameters: int
    """The number of weights of the matrices of all layers, of which an optimizer such as Muon takes whole ones."""
    layer_experts: int
    """The number of weights of a layer in experts that ranks can divide (`learner.mesh.expert`), the most of any."""
    all_experts: int
    """The number of weights of all layers in such experts."""
    kv_floats: int
    """The number of values that a token has in the KV cache."""
    adapters: Mapping[str, int]
    """The number of weights of LoRA adapters of rank 1 on all layers, by the published name of what they adapt."""

    def adapter_parameters(self, rank: int, modules: Sequence[str] = PROJECTIONS) -> int:
        """Returns the number of weights of LoRA adapters on `modules`; `PROJECTIONS` means all that have adapters."""
        names = self.adapters if tuple(modules) == PROJECTIONS else modules
        return rank * sum(self.adapters.get(name, 0) for name in names)
