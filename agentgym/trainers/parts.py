"""The parts of a run: the engine that samples, the stage that plays, the learner that learns; here or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.hf import HfEngine
from agentgym.engines.hf_checkpoint import load_decoder
from agentgym.engines.hf_model import Decoder
from agentgym.engines.protocol import Engine
from agentgym.errors import AgentGymError, ConfigError
from agentgym.trainers.batch import TrainingBatch
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.critic import CriticStats
from agentgym.trainers.engine import open_engine
from agentgym.trainers.learner import Learner, StepStats
from agentgym.trainers.learner_config import LearnerConfig
from agentgym.trainers.stage import LocalStage, Stage

__all__ = ["LearnerLost", "Origin", "PolicyLearner", "RunParts", "ValueReader", "open_parts"]

NO_RAY = "executor ray needs Ray ({error}): pip install 'agentgym-llm[ray]'"


class LearnerLost(AgentGymError, RuntimeError):
    """A process of the learner died, and with it what was computed since the newest checkpoint."""


class ValueReader(Protocol):
    """A critic, as far as a run asks it."""

    def read(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """See `Critic.read`."""


class PolicyLearner(Protocol):
    """A learner, in this process or of several; see `Learner` for what each method does."""

    config: LearnerConfig
    temperature: float

    @property
    def critic(self) -> ValueReader | None:
        """None where the algorithm has none."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""

    def update(self, batch: TrainingBatch, *, version: int = 0, max_mismatch: float = ...) -> StepStats:
        """Goes over a batch."""

    def update_critic(self, batch: TrainingBatch) -> CriticStats | None:
        """Fits the critic to a batch."""

    def logprobs(self, batch: TrainingBatch, temperature: float | None = None) -> Tensor:
        """Of the trained targets."""

    def penalties(self, batch: TrainingBatch) -> Tensor:
        """Of the KL term in the reward."""

    def gradient_proxies(self, batch: TrainingBatch) -> Tensor:
        """Squared norms of the gradients of logits."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from it."""

    def close(self) -> None:
        """Ends it."""


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


async def open_parts(
    config: TrainConfig,
    origin: Origin,
    stack: AsyncExitStack,
    tell: Callable[[str], None],
    metered: Callable[[Engine], Engine] = lambda engine: engine,
) -> RunParts:
    """Makes the parts; the stack closes them, the last one first. `tell` is given lines that a user should see, and
    `metered` gives the engine that episodes in this process are played with."""
    if config.executor == "ray":
        try:
            cluster = import_module("agentgym.trainers.cluster.run")
        except ImportError as error:
            raise ConfigError(NO_RAY.format(error=error)) from error
        parts: RunParts = await cluster.open_cluster(config, origin, stack, tell)
        return parts
    if config.engine != "hf":
        tell(f"start {config.engine}")
    engine = await open_engine(
        config, origin.model, origin.model_folder, version=origin.version, log_folder=origin.logs
    )
    stack.push_async_callback(engine.close)
    if isinstance(engine, HfEngine) and engine.compiles:
        tell("compile")
        await engine.prepare()
    learner = Learner(
        origin.model,
        config.learner,
        config.optimizer,
        total_steps=config.steps,
        temperature=config.sampling.temperature,
        reference=load_decoder(origin.model_folder) if config.learner.kl.coefficient else None,
    )
    stack.callback(learner.close)
    return RunParts(engine, LocalStage(config, metered(engine), origin.renderer), learner)
