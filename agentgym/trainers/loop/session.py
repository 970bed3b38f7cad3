"""The open parts of a run while it trains."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentgym.chat_templates import Renderer
from agentgym.engines.protocol import Engine, WeightSync
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.trainers.batch.credits import GroupCredit
from agentgym.trainers.checkpoints.checkpoint import Snapshot
from agentgym.trainers.checkpoints.random_states import random_states
from agentgym.trainers.checkpoints.run_folder import RunFolder
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.policy_learner import PolicyLearner
from agentgym.trainers.loop.observer import Observer
from agentgym.trainers.loop.player import Player
from agentgym.trainers.loop.train_result import RunEnd
from agentgym.trainers.monitoring.instruments import Instruments
from agentgym.trainers.monitoring.metrics import EvalScore, RolloutSummary, StepMetrics
from agentgym.trainers.monitoring.parity import ParityGate
from agentgym.trainers.monitoring.watch import CollapseWatch
from agentgym.trainers.parts.parts import TrainedWeights
from agentgym.trainers.tasks import TaskSource
from agentgym.trajectory import Group, shortest_floats

__all__ = ["Progress", "TrainingSession", "WeightPublisher"]


@dataclass(eq=False)
class Progress:
    """The position of a run; the only part of it that changes from step to step."""

    step: int
    """The number of complete steps, which is the version of the policy."""
    train_s: float
    """The seconds of playing and learning since the run began, without evaluations."""
    random: Mapping[str, Any]
    """The states of the random generators after the last complete step."""
    held_out: EvalScore | None = None
    """The evaluation since the last step, which the line of the next step has."""
    stalled: RunEnd | None = None
    """The reason why an evaluation that was played while a step learned ends training."""
    is_between_steps: bool = True
    """False while a step updates weights and files: a second Ctrl-C does not wait, and may leave them half updated."""

    def add_step(self, seconds: float) -> None:
        """Counts a step that took so many seconds."""
        self.step += 1
        self.train_s += seconds


@dataclass(frozen=True, eq=False)
class WeightPublisher:
    """Sends the learner's weights to the engine."""

    weights: TrainedWeights
    player: Player
    instruments: Instruments

    async def publish(self, version: int) -> WeightSync:
        """Sends the current weights as `version`."""
        with self.instruments.doing("sync"):
            sync = await self.weights.send(version)
        self.player.on_publish(version)
        return sync


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingSession:
    """All that a step of a run uses."""

    config: TrainConfig
    folder: RunFolder
    model_folder: Path
    """The folder of the run's first weights, with the tokenizer."""
    renderer: Renderer
    source: TaskSource
    instruments: Instruments
    watch: CollapseWatch
    observer: Observer
    progress: Progress
    engine: Engine
    learner: PolicyLearner
    player: Player
    publisher: WeightPublisher
    gate: ParityGate
    writer: EpisodeWriter

    def save(self) -> Path:
        """Starts to write the checkpoint of the last complete step, if there is none, and returns its path."""
        step, checkpoints = self.progress.step, self.folder.checkpoints
        if checkpoints.holds(step):
            return checkpoints.path_of(step)
        checkpoints.wait()  # until its copy is free again
        states = {"tasks": self.source.state(), "random": self.progress.random, "record": self.folder.heads}
        content, renderer = self.publisher.weights.copy(), self.renderer
        snapshot = Snapshot(step=step, content=content, tokenizer=self.model_folder, renderer=renderer, **states)
        return checkpoints.save(snapshot, self.folder.steps())

    async def record_episodes(self, groups: Sequence[Group], advantages: Sequence[GroupCredit]) -> RolloutSummary:
        """Writes the episodes of the step that has just been completed, and returns their summary."""
        step = self.progress.step
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        members = [member for credit in advantages for member in credit.members]
        per_token = (None if member is None else [shortest_floats(row) for row in member] for member in members)
        await self.writer.append(trajectories, phase="train", step=step, advantages=per_token)
        return await asyncio.to_thread(RolloutSummary.of, groups, advantages)

    def record_metrics(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Writes, shows and logs a step's metrics; raises TrainingHalted if a symptom of collapse ends the run."""
        metrics = replace(self.watch.see(metrics), held_out=self.progress.held_out)
        self.progress.held_out = None
        self.folder.write_metrics(metrics, self.writer.head)
        self.observer.on_step(metrics)
        self.instruments.log_step(metrics, groups)
        if halt := self.watch.halt:
            self.progress.random = random_states()
            self.save()
            raise halt
