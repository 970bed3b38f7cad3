"""The processes of a learner: one, or the ranks that its model is sharded over."""

from __future__ import annotations

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.trainers.parallel.sharded_tensor import is_sharded
from agentgym.trainers.parallel.world import LearnerRanks, OneProcess, Sharded
from agentgym.trainers.settings.learner import LearnerConfig

__all__ = ["world_of"]


def world_of(model: Decoder | Sharded, config: LearnerConfig) -> LearnerRanks:
    """Returns the processes of a learner of the model; raises ConfigError for settings that they cannot satisfy."""
    if isinstance(model, Sharded):
        if config.critic.trunk == "shared":
            remedy = "on several ranks give it a trunk of its own (critic.trunk own)"
            raise ConfigError(f"a critic on the policy's trunk is for a learner in one process; {remedy}")
        config.check_shares(model.ranks.size)
        return model.ranks
    if is_sharded(model.embed):
        raise ConfigError("the model is sharded: give the learner what Ranks.shard gave, which knows the ranks")
    config.mesh.check_alone()
    device = model.embed.device
    num_threads = config.num_threads if device.type == "cpu" else 1
    return OneProcess(device, num_threads, portions=config.shares or 1, shape=model.config)
