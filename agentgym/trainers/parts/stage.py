"""The factories of a run's loops and samplers: for training, evaluation, the parity probe and greedy episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol, TypeAlias

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Engine
from agentgym.rollout.episode.episode_loop import EpisodeLoop
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.hosting.env_host import EnvHost
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.sampler import Sampler
from agentgym.trainers.config import TrainConfig

__all__ = ["PROBE_EPISODES", "LocalStage", "Part", "Stage", "loop_for"]

PROBE_TOKENS = 256
"""The most ids of a reply in a probe of the parity check."""
PROBE_EPISODES = 4
"""The episodes of a probe: a thousand tokens are enough to tell a wrong distribution, and cost next to nothing."""
PROBE_TURNS = 3
"""The most replies of such an episode: several, so that the prefix cache is probed too."""
Part: TypeAlias = Literal["train", "eval", "probe", "greedy"]
"""The purpose of episodes: training, evaluation, the engine's parity probe (short ones), or temperature 0."""


class Stage(Protocol):
    """Makes the loops and samplers that play a run's episodes, in this process or elsewhere."""

    def loop(self, part: Part) -> EpisodeLoop:
        """The loop that plays an episode."""

    def sampler(self, loop: EpisodeLoop, env_host: EnvHost | None = None) -> Sampler:
        """The sampler that plays many episodes in `loop` or a loop that wraps it, with another sampler's `env_host`."""


class LocalStage:
    """Makes loops and samplers that play in this process."""

    def __init__(self, config: TrainConfig, engine: Engine, renderer: Renderer) -> None:
        self._config = config
        self._engine = engine
        self._renderer = renderer

    def loop(self, part: Part) -> RolloutLoop:
        """Returns the loop that plays an episode in this process."""
        return loop_for(part, self._config, self._engine, self._renderer)

    def sampler(self, loop: EpisodeLoop, env_host: EnvHost | None = None) -> Sampler:
        """Returns a sampler that plays many episodes in `loop`, in this process."""
        return Sampler(loop, config=self._config.sampler, env_host=env_host)


def limits_for(part: Part, config: TrainConfig) -> Limits:
    """The limits of an episode."""
    if part != "probe":
        return config.limits
    limits = config.limits
    max_turns = min(PROBE_TURNS, limits.max_turns)
    return replace(limits, max_turns=max_turns, turn_tokens=min(PROBE_TOKENS, limits.turn_tokens or PROBE_TOKENS))


def loop_for(part: Part, config: TrainConfig, engine: Engine, renderer: Renderer) -> RolloutLoop:
    """The rollout loop of a run's episodes."""
    temperatures = {"greedy": 0.0, "eval": config.eval.temperature}
    temperature = temperatures.get(part)
    return RolloutLoop(
        engine,
        renderer,
        limits_for(part, config),
        config.sampling.for_episodes(temperature),
        history=config.history,
        compaction=config.compaction,
    )
