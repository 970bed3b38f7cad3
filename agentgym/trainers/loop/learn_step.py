"""The learning half of a step: credit, update, weight sync to the engine, and saving a step that was halted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentgym.engines.protocol import Engine, WeightSync
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.errors import TrainingHalted
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.batch.credits import GroupCredit
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.critic import CriticStats
from agentgym.trainers.learner.finite import NotFinite, check_finite
from agentgym.trainers.learner.learner import StepStats
from agentgym.trainers.learner.mismatch import MismatchFound
from agentgym.trainers.learner.objective import needs_all_rows
from agentgym.trainers.learner.policy_learner import PolicyLearner
from agentgym.trainers.loop.step_credit import credit_step
from agentgym.trainers.monitoring.halt import HaltedStep
from agentgym.trainers.monitoring.instruments import Instruments
from agentgym.trainers.monitoring.parity import ParityGate
from agentgym.trainers.monitoring.watch import CollapseWatch
from agentgym.trajectory import Group

__all__ = ["LearnStep"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, eq=False, kw_only=True)
class LearnStep:
    """The learning half of a run's steps; `done` is always the number of steps taken before."""

    config: TrainConfig
    folder: Path
    """The folder of the run."""
    engine: Engine
    learner: PolicyLearner
    gate: ParityGate
    watch: CollapseWatch
    instruments: Instruments
    publish: Callable[[int], Awaitable[WeightSync]]
    """Sends the weights to the engine as a version."""
    save: Callable[[], object]
    """Writes a checkpoint of the last complete step."""

    async def credit(self, done: int, groups: Sequence[Group], greedy: Mapping[str, float]) -> list[GroupCredit]:
        """Returns the credit of the groups, or empty credit if it is not finite and the run goes on without the step.

        Without playing ahead, the engine is paused from here until it has the new weights.
        """
        if not self.config.max_staleness:
            await self.engine.pause()
        try:
            return await self._meanwhile(lambda: credit_step(groups, self.config, self.learner, greedy, version=done))
        except TrainingHalted as halted:
            step = HaltedStep.without_credit(done + 1, groups)
            await self._keep(step, halted, is_whole=True)
            return list(step.credits)

    async def learn(
        self, done: int, groups: Sequence[Group], credits: Sequence[GroupCredit]
    ) -> tuple[StepStats | None, CriticStats | None, WeightSync]:
        """Updates on the groups and publishes the weights as the next version; no stats if there is no signal."""
        config = self.config
        batch = build_batch(
            groups,
            credits,
            aggregation=config.aggregation or "",
            norm_tokens=config.norm_tokens,
            drop_zero=not needs_all_rows(config.learner),
        )
        stats = critic = None
        if batch.num_rows:
            step = HaltedStep(step=done + 1, groups=groups, credits=credits, batch=batch)
            num_steps = self.learner.num_steps
            try:
                if done >= config.learner.critic.warmup_steps:
                    stats = await self._meanwhile(lambda: self._update(batch, done))
                critic = await self._meanwhile(lambda: self.learner.update_critic(batch))
            except TrainingHalted as halted:
                await self._keep(step, halted, is_whole=self.learner.num_steps == num_steps)
        sync = await self._send(done + 1)
        return stats, critic, sync

    async def _send(self, version: int) -> WeightSync:
        """Publishes the weights while the engine is paused; without playing ahead, it is paused already.

        An engine that loads weights while it samples is not paused at all.
        """
        engine = self.engine
        if self.config.max_staleness:
            if isinstance(engine, ReplicatedEngine) and engine.updates_running:
                return await self.publish(version)
            await engine.pause()
        sync = await self.publish(version)
        await self.engine.resume()
        return sync

    def _update(self, batch: TrainingBatch, version: int) -> StepStats:
        """Updates on the batch; raises TrainingHalted if the update fails."""
        stats = self.learner.update(batch, version=version, max_mismatch=self.gate.bound)
        self.instruments.record_update(batch)
        check_finite(self.learner.logprobs(batch.select([0])))
        return stats

    async def _meanwhile(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, run on its own thread if sampling goes on meanwhile."""
        return await asyncio.to_thread(work) if self.config.max_staleness else work()

    async def _keep(self, step: HaltedStep, halted: TrainingHalted, *, is_whole: bool) -> None:
        """Saves a halted step, and a checkpoint of the step before if the weights have not changed since.

        Returns if the run goes on without the rest of the step; raises otherwise.
        """
        message = f"{halted}. The step's episodes and its batch are in {step.save(self.folder)}"
        done = step.step - 1
        if is_whole and done:
            self.save()
        if isinstance(halted, MismatchFound):
            logger.warning("%s", message)
            await self.engine.resume()
            await self.gate.refuse(halted, done, step.batch)
        if not is_whole:  # an optimizer step of this batch was taken, and may have destroyed the weights
            try:
                check_finite(self.learner.logprobs(step.batch.select([0])))
            except NotFinite as lost:
                raise NotFinite(
                    f"{lost}. First seen as: {message}" if lost.args != halted.args else message
                ) from halted
        if "nan" in self.config.collapse.stop_on:
            raise NotFinite(f"{message}. Without nan in collapse.stop_on, such a step is left out") from halted
        self.watch.add_sign("nan", f"{message}; the step is left out")
