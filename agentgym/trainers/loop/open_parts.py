"""Creates the parts of a run: engine, stage and learner, in this process or on a cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Engine, WeightSync
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.errors import ConfigError
from agentgym.extras import install_extra
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import published_views
from agentgym.trainers.checkpoints.checkpoint import LocalContent, load_learner
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.monitoring.collapse import MAX_MERGE_LOST
from agentgym.trainers.parallel.gradient_threads import one_core
from agentgym.trainers.parts.engine import load_model, open_engine, weights_for
from agentgym.trainers.parts.parts import Origin, RunParts
from agentgym.trainers.parts.stage import LocalStage

__all__ = ["import_cluster", "open_parts"]

logger = logging.getLogger(__name__)

NO_RAY = "executor ray needs Ray ({error}): {command}"


async def open_parts(
    config: TrainConfig,
    origin: Origin,
    stack: AsyncExitStack,
    show: Callable[[str], None],
    metered: Callable[[Engine], Engine] = lambda engine: engine,
) -> RunParts:
    """Creates the parts; the stack closes them, the last one first.

    `show` is called with lines that a user should see. `metered` returns the engine that plays the episodes of this
    process.
    """
    show(f"model {config.model}")
    if config.executor == "ray":
        parts: RunParts = await import_cluster().open_cluster(config, origin, stack, show)
        return parts
    if config.plays and config.engine != "local":
        show(f"start {config.engine}")
    engine = await open_engine(
        config, origin.model, origin.model_folder, version=origin.version, log_folder=origin.logs
    )
    stack.push_async_callback(engine.close)
    if isinstance(engine, LocalEngine) and engine.compiles:
        show("compile")
        await engine.prepare()
    needs_first = config.learner.needs_first_weights and not config.adapts_in_place
    learner = Learner(
        origin.model,
        config.learner,
        config.optimizer,
        total_steps=config.steps,
        temperature=config.sampling.temperature,
        reference=load_model(origin.model_folder, config) if needs_first else None,
    )
    stack.callback(learner.close)
    weights = LocalWeights(engine, origin.model, learner)
    return RunParts(engine, LocalStage(config, metered(engine), origin.renderer), learner, weights)


def import_cluster() -> ModuleType:
    """Returns the module that runs on a cluster; raises ConfigError without Ray."""
    try:
        return import_module("agentgym.trainers.cluster.run")
    except ImportError as error:
        raise ConfigError(NO_RAY.format(error=error, command=install_extra("ray"))) from error


@dataclass(frozen=True, eq=False)
class LocalWeights:
    """The trained weights of a model in this process."""

    engine: Engine
    model: LanguageModel
    learner: Learner
    memory: CopyMemory = field(default_factory=CopyMemory)

    async def send(self, version: int) -> WeightSync:
        """Updates the engine's weights, unless it samples from the model itself."""
        if isinstance(self.engine, ReplicatedEngine) and self.engine.settings.sleep:
            torch.cuda.empty_cache()  # a server that wakes on this GPU takes its memory back
        return await self.engine.update_weights(weights_for(self.engine, self.model), version)

    def copy(self) -> LocalContent:
        """Takes the tensors, merged where adapters are beside them; those of a GPU are copied."""
        adapters, weights = self.learner.adapters, published_views(self.model)
        if adapters is None or adapters.published is not None:
            return LocalContent.of(self.model, weights, self.learner.state_dict(), self.memory)
        with one_core():  # for the same bits whatever the threads
            weights = adapters.merged_weights(adapted_only=False)
            content = LocalContent.of(self.model, weights, self.learner.state_dict(), self.memory)
        if (lost := adapters.merge_lost or 0.0) > MAX_MERGE_LOST:
            text = "the model lacks %.0f%% of what its adapters learned, less than a bit: learn in float32 (%s)"
            logger.warning(text, 100 * lost, "--dtype float32")
        return content

    def load(self, checkpoint: Path) -> None:
        """Loads the learner's whole state."""
        self.learner.load_state_dict(load_learner(checkpoint))
