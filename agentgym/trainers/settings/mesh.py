"""The settings of ranks that share forward passes or experts, apart from each rank taking rows of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentgym.errors import ConfigError
from agentgym.model.decoder_config import DecoderConfig
from agentgym.settings.config_class import config_class

__all__ = ["MeshConfig"]


@config_class
class MeshConfig:
    """Ranks that share each forward pass: `sequence` x `tensor` of them. All other ranks take other rows, so a learner
    of 8 ranks with `sequence` 2 and `tensor` 2 has two such blocks, each with its share of the batch. Ranks that share
    the experts of a mixture, `expert` of them, take rows of their own."""

    sequence: int = 1
    """Ranks that split the tokens of a forward pass, for trajectories whose activations are too large for one rank:
    each has a portion of the tokens, and for attention all tokens of a part of the heads (Ulysses). Divides the query
    heads."""
    tensor: int = 1
    """Ranks that split the weights of each layer by heads and by units of the feed-forward, and the tokens too between
    these (tensor parallel), for layers that are too large to be whole on one rank even one at a time. Divides the
    key/value heads."""
    expert: int = 1
    """Ranks that divide the experts of each layer of a mixture: tokens are sent to the ranks of their experts, and no
    rank gathers the experts of another one of them. Divides the experts."""

    def __post_init__(self) -> None:
        for name in ("sequence", "tensor", "expert"):
            if getattr(self, name) < 1:
                raise ConfigError(f"learner.mesh.{name} is at least 1, got {getattr(self, name)}")
        if self.expert > 1 and self.block > 1:
            raise ConfigError(
                "learner.mesh.expert is for mixtures of experts, whose passes ranks do not share: leave"
                " learner.mesh.sequence and learner.mesh.tensor out"
            )

    @property
    def block(self) -> int:
        """The number of ranks that share a forward pass."""
        return self.sequence * self.tensor

    def data(self, num_ranks: int) -> int:
        """The number of shares of a batch on `num_ranks`; raises ConfigError if that is not a multiple of the block."""
        if num_ranks % self.expert:
            raise ConfigError(
                f"{num_ranks} learner ranks are no multiple of learner.mesh.expert {self.expert}: give {self.expert},"
                " or a multiple of it (with executor ray, ray.learners)"
            )
        if num_ranks % self.block:
            raise ConfigError(
                f"{num_ranks} learner ranks are no multiple of learner.mesh.sequence {self.sequence} x"
                f" learner.mesh.tensor {self.tensor}: give {self.block}, or a multiple of it (with executor ray,"
                " ray.learners)"
            )
        return num_ranks // self.block

    def check_alone(self) -> None:
        """Raises ConfigError if passes or experts are to be shared, since there is one process."""
        if self.block > 1 or self.expert > 1:
            raise ConfigError(
                "learner.mesh is for a learner of several ranks: give executor ray (or Ranks under torchrun,"
                " `agentgym docs ranks`), or leave it out"
            )

    def check(self, shape: DecoderConfig, num_ranks: int) -> None:
        """Raises ConfigError if a decoder of this shape cannot be split this way on `num_ranks`."""
        self.check_experts(0, num_ranks)
        splits = [
            (shape.num_kv_heads, "key/value heads", self.tensor, "learner.mesh.tensor says"),
            (shape.ffn_width, "units of the feed-forward", self.tensor, "learner.mesh.tensor says"),
            (shape.num_heads, "query heads", self.block, "learner.mesh.sequence x learner.mesh.tensor says"),
        ]
        if self.tensor > 1:
            shards, shards_need = num_ranks // self.tensor, "the shards of each part of learner.mesh.tensor need"
            splits += [
                (shape.width, "numbers of a state", self.tensor, "learner.mesh.tensor says"),
                (shape.width, "numbers of a state", shards, shards_need),
            ]
        if self.tensor > 1 and shape.qkv_bias:
            rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_width
            splits.append((rows, "biases", num_ranks, shards_need))
        for number, what, parts, why in splits:
            if number % parts:
                raise ConfigError(
                    f"the model's {number} {what} cannot be split into {parts} equal parts, as {why}: give sizes that"
                    f" divide {number}"
                )

    def check_experts(self, number: int, num_ranks: int, shapes: Collection[Sequence[int]] = ()) -> None:
        """Raises ConfigError if a layer's `number` experts cannot be divided this way; 0 is for none that ever can.

        `shapes` are those of their stacks, which are sharded over blocks of ranks in another dimension than the first.
        """
        if self.expert == 1:
            return
        if not number:
            raise ConfigError(
                "learner.mesh.expert divides the experts of a mixture that transformers keeps in stacks and computes"
                " in several ways, and this model has none: leave it out"
            )
        if number % self.expert:
            raise ConfigError(
                f"the model's {number} experts of a layer cannot be divided by learner.mesh.expert {self.expert}"
            )
        blocks = num_ranks // self.expert
        if odd := [shape for shape in shapes if all(size % blocks for size in shape[1:])]:
            sizes = " x ".join(map(str, odd[0][1:]))
            raise ConfigError(
                f"experts of {sizes} numbers cannot be sharded over the {blocks} blocks of learner.mesh.expert"
                f" {self.expert}: give another number of learner ranks"
            )
