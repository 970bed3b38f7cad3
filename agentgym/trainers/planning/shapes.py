"""Shapes of models: their parameters, and their keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentgym.trainers.settings.lora import PROJECTIONS

__all__ = ["SHAPES", "Counts", "Experts", "ModelShape"]

EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")


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
class Counts:
    """The numbers of a model whose weights were counted, and not computed from its widths."""

    parameters: int
    largest_block: int
    """The parameters of the largest block that ranks gather at once."""
    outside: int
    """The parameters outside of all blocks."""
    matrices: int
    """The parameters of the matrices in the blocks."""
    adapter: int
    """The parameters of adapters of rank 1 on all matrices."""
    kv_floats: int
    block_experts: int = 0
    """The parameters of the largest block in experts that ranks can divide (`learner.mesh.expert`)."""
    experts: int = 0
    """The parameters of all blocks in such experts."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of the Llama, Mistral, Qwen2 and Qwen3 families or a mixture of Qwen3, as published, or any other model
    with what was counted of it.

    Example: `SHAPES["Qwen3-8B"].num_parameters` is 8,190,735,360, and a token's keys and values are 73,728 numbers.
    """

    name: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    tied: bool = False
    """True if the head is the embedding."""
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: Experts | None = None
    counts: Counts | None = None
    refusal: str = ""
    """The reason that the fast decoder does not compute the model, which transformers does then; empty if it does."""

    @property
    def q_width(self) -> int:
        """The width of all heads' queries of a token in a layer."""
        return self.num_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """The width of all heads' keys of a token in a layer, or of their values."""
        return self.num_kv_heads * self.head_width

    @property
    def matrices(self) -> Mapping[str, tuple[int, int]]:
        """The input and output widths of a layer's matrices, by their published names."""
        e, q, kv, f = self.width, self.q_width, self.kv_width, self.ffn_width
        return dict(zip(PROJECTIONS, ((e, q), (e, kv), (e, kv), (q, e), (e, f), (e, f), (f, e)), strict=True))

    @property
    def matrix_parameters(self) -> int:
        """The number of weights of the matrices of all layers, of which an optimizer such as Muon takes whole ones."""
        if self.counts is not None:
            return self.counts.matrices
        router = 0 if self.experts is None else self.width * self.experts.number
        matrices = sum(self._copies(name) * inputs * outputs for name, (inputs, outputs) in self.matrices.items())
        return self.num_layers * (matrices + router)

    @property
    def layer_parameters(self) -> int:
        """The number of weights of a layer, norms and biases included; of the largest one if layers differ."""
        if self.counts is not None:
            return self.counts.largest_block
        norms = 2 * self.width + (2 * self.head_width if self.qk_norm else 0)
        biases = self.q_width + 2 * self.kv_width if self.qkv_bias else 0
        return self.matrix_parameters // self.num_layers + norms + biases

    @property
    def layer_experts(self) -> int:
        """The number of weights of a layer in experts that ranks can divide (`learner.mesh.expert`)."""
        if self.counts is not None:
            return self.counts.block_experts
        return 0 if self.experts is None else 3 * self.experts.number * self.experts.width * self.width

    @property
    def all_experts(self) -> int:
        """The number of weights of all layers in such experts."""
        return self.num_layers * self.layer_experts if self.counts is None else self.counts.experts

    @property
    def head_parameters(self) -> int:
        """The number of weights outside of the layers: embedding, head, last norm."""
        if self.counts is not None:
            return self.counts.outside
        return self.vocab_size * self.width * (1 if self.tied else 2) + self.width

    @property
    def num_parameters(self) -> int:
        """The number of all weights."""
        if self.counts is not None:
            return self.counts.parameters
        return self.num_layers * self.layer_parameters + self.head_parameters

    @property
    def kv_floats(self) -> int:
        """The number of values that a token has in the KV cache."""
        return 2 * self.num_layers * self.kv_width if self.counts is None else self.counts.kv_floats

    def adapter_parameters(self, rank: int, modules: Sequence[str] = PROJECTIONS) -> int:
        """Returns the number of weights of LoRA adapters on `modules` of all layers."""
        if self.counts is not None:
            return rank * self.counts.adapter
        adapted = sum(self._copies(name) * sum(self.matrices.get(name, ())) for name in modules)
        return self.num_layers * rank * adapted

    def _copies(self, name: str) -> int:
        return self.experts.number if self.experts is not None and name in EXPERT_MATRICES else 1


def _qwen3(name: str, layers: int, width: int, heads: int, ffn: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        name=name,
        vocab_size=151_936,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_width=128,
        ffn_width=ffn,
        tied=tied,
        qk_norm=True,
    )


def _qwen3_mixture(name: str, layers: int, width: int, heads: int, expert_width: int) -> ModelShape:
    experts = Experts(number=128, chosen=8, width=expert_width)
    shape = replace(_qwen3(name, layers, width, heads, expert_width), num_kv_heads=4, experts=experts)
    return replace(shape, refusal="it is a mixture of experts")


def _grouped_query_shape(name: str, layers: int, width: int, ffn: int, vocab: int) -> ModelShape:
    """Returns a shape of Llama 3.1, or of Qwen2.5 without its biases: eight heads of keys and values, of width 128."""
    return ModelShape(
        name=name,
        vocab_size=vocab,
        width=width,
        num_layers=layers,
        num_heads=width // 128,
        num_kv_heads=8,
        head_width=128,
        ffn_width=ffn,
    )


def _known_shapes() -> dict[str, ModelShape]:
    shapes = [
        _qwen3("Qwen3-0.6B", 28, 1024, 16, 3072, tied=True),
        _qwen3("Qwen3-1.7B", 28, 2048, 16, 6144, tied=True),
        _qwen3("Qwen3-4B", 36, 2560, 32, 9728, tied=True),
        _qwen3("Qwen3-8B", 36, 4096, 32, 12_288),
        _qwen3("Qwen3-14B", 40, 5120, 40, 17_408),
        _qwen3("Qwen3-32B", 64, 5120, 64, 25_600),
        _qwen3_mixture("Qwen3-30B-A3B", 48, 2048, 32, 768),
        _qwen3_mixture("Qwen3-235B-A22B", 94, 4096, 64, 1536),
        replace(_grouped_query_shape("Qwen2.5-7B", 28, 3584, 18_944, 152_064), num_kv_heads=4, qkv_bias=True),
        replace(_grouped_query_shape("Qwen2.5-72B", 80, 8192, 29_568, 152_064), qkv_bias=True),
        _grouped_query_shape("Llama-3.1-8B", 32, 4096, 14_336, 128_256),
        _grouped_query_shape("Llama-3.1-70B", 80, 8192, 28_672, 128_256),
    ]
    return {shape.name: shape for shape in shapes}


SHAPES = _known_shapes()
"""The known shapes, by their published names."""
