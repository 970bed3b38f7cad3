"""The parts of a run: its engine, its learner and the stage that plays its episodes.

Needs no torch, since workers of a cluster have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Engine, WeightSync
from agentgym.errors import AgentGymError
from agentgym.trainers.parts.stage import Stage

if TYPE_CHECKING:
    from agentgym.model.language_model import LanguageModel
    from agentgym.trainers.learner.policy_learner import PolicyLearner

__all__ = ["LearnerLost", "Origin", "RunParts", "SnapshotContent", "TrainedWeights"]


class LearnerLost(AgentGymError, RuntimeError):
    """A process of the learner died, and the steps since the newest checkpoint are lost."""


@dataclass(frozen=True, eq=False)
class Origin:
    """The model and weights that a run starts or resumes with."""

    model: LanguageModel
    """The model with the weights that are trained, or without any if ranks on a cluster have them."""
    renderer: Renderer
    model_folder: Path
    """The folder of the run's first weights, with the tokenizer."""
    weights_folder: Path
    """The folder of the weights to continue with: the same, or a checkpoint."""
    version: int
    """The policy version of these weights."""
    run_folder: Path

    @property
    def logs(self) -> Path:
        """The folder for the logs of launched servers."""
        return self.run_folder / "servers"


class SnapshotContent(Protocol):
    """The weights and the learner's state, as they are or copied."""

    @property
    def is_live(self) -> bool:
        """True for the tensors themselves, which must not change until they are written."""

    def write(self, folder: Path) -> None:
        """Writes the files of the model, and the learner's state into its subfolder `learner`."""


class TrainedWeights(Protocol):
    """The weights of a run, and all else that its learner resumes with, wherever they are."""

    async def send(self, version: int) -> WeightSync:
        """Gives the engine the newest weights as a policy version."""

    def copy(self) -> SnapshotContent:
        """Takes weights and state to be written, as copies where that cannot end before the next update."""

    def load(self, checkpoint: Path) -> None:
        """Loads the learner's state from the folder of a checkpoint, whose weights it has."""


@dataclass(frozen=True, eq=False)
class RunParts:
    """The engine, stage and learner of a run."""

    engine: Engine
    stage: Stage
    learner: PolicyLearner
    weights: TrainedWeights
