"""The parts of a run: its engine, its learner and the stage that plays its episodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Engine
from agentgym.errors import AgentGymError
from agentgym.model.language_model import LanguageModel
from agentgym.trainers.learner.policy_learner import PolicyLearner
from agentgym.trainers.parts.stage import Stage

__all__ = ["LearnerLost", "Origin", "RunParts"]


class LearnerLost(AgentGymError, RuntimeError):
    """A process of the learner died, and the steps since the newest checkpoint are lost."""


@dataclass(frozen=True, eq=False)
class Origin:
    """The model and weights that a run starts or resumes with."""

    model: LanguageModel
    """This process's weights: those that are trained, or a copy of those trained on a cluster."""
    renderer: Renderer
    model_folder: Path
    """The folder of the run's first weights, with the tokenizer."""
    weights_folder: Path
    """The folder of the weights to continue with: the same, or a checkpoint."""
    version: int
    """The policy version of these weights."""
    logs: Path
    """The folder for the logs of launched servers."""


@dataclass(frozen=True, eq=False)
class RunParts:
    """The engine, stage and learner of a run."""

    engine: Engine
    stage: Stage
    learner: PolicyLearner
