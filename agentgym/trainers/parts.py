"""The parts of a run: the engine that samples, the stage that plays, the learner that learns; here or on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.hf import HfEngine
from agentgym.engines.hf_model import Decoder
from agentgym.engines.protocol import Engine
from agentgym.errors import AgentGymError, ConfigError
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.engine import load_model, open_engine
from agentgym.trainers.learner import Learner
from agentgym.trainers.policy_learner import PolicyLearner
from agentgym.trainers.stage import LocalStage, Stage

__all__ = ["LearnerLost", "Origin", "RunParts", "open_parts"]

NO_RAY = "executor ray needs Ray ({error}): pip install 'agentgym-llm[ray]'"


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
        reference=load_model(origin.model_folder, config.learner) if config.learner.needs_first_weights else None,
    )
    stack.callback(learner.close)
    return RunParts(engine, LocalStage(config, metered(engine), origin.renderer), learner)
