"""Plays episodes and records every sampled id with its provenance."""

from typing import TYPE_CHECKING

from agentgym.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agentgym.rollout.agents.agent_episode import AgentEpisode
    from agentgym.rollout.episode.constrained import ConstrainedLoop
    from agentgym.rollout.episode.episode import Episode
    from agentgym.rollout.episode.replies import reply_ids
    from agentgym.rollout.episode.token_loop import RolloutLoop
    from agentgym.rollout.limits import Limits, SamplingConfig
    from agentgym.rollout.record.episodes_file import (
        EpisodeRecord,
        EpisodeWriter,
        read_episodes,
        trajectory_from_json,
        trajectory_to_json,
    )
    from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
    from agentgym.rollout.seeds import derive

__all__ = [
    "AgentEpisode",
    "ConstrainedLoop",
    "Episode",
    "EpisodeRecord",
    "EpisodeWriter",
    "Limits",
    "RolloutLoop",
    "Sampler",
    "SamplerConfig",
    "SamplingConfig",
    "derive",
    "read_episodes",
    "reply_ids",
    "trajectory_from_json",
    "trajectory_to_json",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AgentEpisode": "agents.agent_episode",
        "ConstrainedLoop": "episode.constrained",
        "Episode": "episode.episode",
        "EpisodeRecord": "record.episodes_file",
        "EpisodeWriter": "record.episodes_file",
        "Limits": "limits",
        "RolloutLoop": "episode.token_loop",
        "Sampler": "sampling.sampler",
        "SamplerConfig": "sampling.sampler",
        "SamplingConfig": "limits",
        "derive": "seeds",
        "read_episodes": "record.episodes_file",
        "reply_ids": "episode.replies",
        "trajectory_from_json": "record.episodes_file",
        "trajectory_to_json": "record.episodes_file",
    },
)
