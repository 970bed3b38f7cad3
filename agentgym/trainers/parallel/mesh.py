"""The ranks of a learner as a grid, and their process groups."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.trainers.parallel.expert_split import expert_stacks, find_experts
from agentgym.trainers.settings.mesh import MeshConfig

__all__ = ["RankMesh", "check_mesh"]


def check_mesh(config: MeshConfig, model: LanguageModel, num_ranks: int) -> None:
    """Raises ConfigError if the passes or the experts of a model cannot be shared in this way by `num_ranks`."""
    if isinstance(model, Decoder):
        config.check(model.config, num_ranks)
        return
    if config.block > 1:
        raise ConfigError(
            "ranks share passes of the fast decoder, and this model is computed by transformers: leave learner.mesh"
            " out, and each rank takes rows of its own"
        )
    stacks = [stack.shape for module in find_experts(model) for stack in expert_stacks(module)]
    for number in {shape[0] for shape in stacks} or {0}:
        config.check_experts(number, num_ranks, stacks)


class RankMesh:
    """Rank `(data * sequences + sequence) * tensors + tensor` of the default group is at (data, sequence, tensor)."""

    weights: DeviceMesh
    """The mesh for FSDP2, shards x tensor: a weight is sharded over the data and the sequence dimension alike."""
    data: dist.ProcessGroup | None
    """The ranks that have the same index in their blocks."""
    block: dist.ProcessGroup
    """The ranks that share this rank's forward passes."""
    sequence: dist.ProcessGroup
    """The ranks of the block that have the same part of the weights. Neither exists if no passes are shared."""
    experts: DeviceMesh | None = None
    """The mesh of experts that ranks divide, shards x expert; None if they do not."""

    def __init__(self, config: MeshConfig, device: str) -> None:
        self.config = config
        self.num_data = config.data(dist.get_world_size())
        self.data_rank, self.block_rank = divmod(dist.get_rank(), config.block)
        self.data = dist.group.WORLD
        if config.block == 1:
            self.weights = _mesh(device, shards=self.num_data)
            if config.expert > 1:
                self.experts = _mesh(device, shards=self.num_data // config.expert, expert=config.expert)
                self.experts._flatten()  # as below
            return
        blocks = _mesh(device, data=self.num_data, block=config.block)
        self.data, self.block = blocks["data"].get_group(), blocks["block"].get_group()
        places = _mesh(device, data=self.num_data, sequence=config.sequence, tensor=config.tensor)
        self.sequence = places["sequence"].get_group()
        self.weights = _mesh(device, shards=self.num_data * config.sequence, tensor=config.tensor)
        self.weights._flatten()  # norms are then summed over all ranks at once, and torch does not warn about two sums

    @property
    def shards(self) -> DeviceMesh:
        """The ranks that the same part of each weight is sharded over."""
        return self.weights["shards"]


def _mesh(device: str, **sizes: int) -> DeviceMesh:
    """The ranks of the default group as a grid, by the names of its dimensions."""
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
