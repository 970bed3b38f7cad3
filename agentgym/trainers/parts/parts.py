"""The parts of a run: its engine, its learner and the stage that plays its episodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Engine
from agentgym.errors import AgentGymError
from agentgym.model.decoder import Decoder
from agentgym.trainers.learner.policy_learner import PolicyLearner
from agentgym.trainers.parts.stage import Stage

__all__ = ["LearnerLost", "Origin", "RunParts"]


class LearnerLost(AgentGymError, RuntimeError):
    """A process of the learner died, and with it what was computed since the newest checkpoint."""


@dataclass(frozen=True, eq=False)
class Origin:
    """What a run begins or goes on with."""

    model: Decoder
    """This process's weights: those that are trained, or the copy of a cluster's."""
    renderer: Renderer
    model_folder: Path
    """Of the run's first weights, with the tokenizer."""
    weights_folder: Path
    """Of the weights to go on with: the same, or a checkpoint."""
    version: int
    """The policy version of these."""
    logs: Path
    """Where servers that are begun keep their logs."""


@dataclass(frozen=True, eq=False)
class RunParts:
    """What a run is made of."""

    engine: Engine
    stage: Stage
    learner: PolicyLearner
