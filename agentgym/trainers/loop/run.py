"""A training run: play groups, learn from them, and evaluate before and after."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeAlias

from agentgym.chat_templates.protocol import Renderer
from agentgym.model.language_model import LanguageModel
from agentgym.model.policy import backend_line
from agentgym.rewards import RewardFunction, open_rewards
from agentgym.rollout.hosting.event_loop import finish_uninterrupted
from agentgym.rollout.record.episodes_file import EpisodeWriter, read_episodes
from agentgym.rollout.record.folder_digests import discard_digests
from agentgym.rollout.sampling.sampler import TooManyFailures
from agentgym.trainers.algorithms.estimators import needs_input
from agentgym.trainers.checkpoints.checkpoint import Checkpoint
from agentgym.trainers.checkpoints.random_states import seed_random, set_random_states
from agentgym.trainers.checkpoints.run_folder import RunFolder
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.lessons.lesson import Lesson
from agentgym.trainers.loop.learn_step import learn_step, publish
from agentgym.trainers.loop.lesson_step import lesson_step
from agentgym.trainers.loop.observer import Observer
from agentgym.trainers.loop.open_parts import open_parts
from agentgym.trainers.loop.player import Player, Sources, open_player
from agentgym.trainers.loop.session import Progress, TrainingSession, WeightPublisher
from agentgym.trainers.loop.train_result import RunEnd, TrainResult
from agentgym.trainers.monitoring.halt import keep_episodes
from agentgym.trainers.monitoring.instruments import Instruments
from agentgym.trainers.monitoring.metrics import EvalScore, score
from agentgym.trainers.monitoring.parity import ParityGate
from agentgym.trainers.monitoring.target import has_stalled, is_target_near
from agentgym.trainers.monitoring.watch import CollapseWatch
from agentgym.trainers.parts.parts import Origin, RunParts
from agentgym.trainers.settings.optimizer import BIG
from agentgym.trainers.speed.memory import peak_memory_mb
from agentgym.trainers.tasks import StepGroups, TaskSource
from agentgym.trajectory import Group

__all__ = ["Run"]

logger = logging.getLogger(__name__)

Phase: TypeAlias = Literal["eval_before", "eval_during", "eval_after"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A run at its newest checkpoint or before its first step; `open_run` makes it, and `fit` trains."""

    config: TrainConfig
    folder: RunFolder
    checkpoint: Checkpoint | None
    """The checkpoint that it resumes from."""
    model_folder: Path
    """The folder of the run's first weights, with the tokenizer."""
    model: LanguageModel
    renderer: Renderer
    source: TaskSource
    held_out: TaskSource
    """The source of the tasks of evaluations."""
    lesson: Lesson[object] | None
    """The rows or pairs that a lesson learns from in place of episodes."""
    reward: RewardFunction | None
    """A function that replaces the configured one."""
    instruments: Instruments
    watch: CollapseWatch
    observer: Observer
    progress: Progress

    async def fit(self) -> TrainResult:
        """Plays and learns until the steps are done, with an evaluation before and after."""
        async with AsyncExitStack() as stack:
            session = await self._open(stack)
            before = after = None
            try:
                if self.checkpoint:
                    before = await asyncio.to_thread(self._recorded_score, "eval_before")
                else:
                    before = await self._evaluate(session, "eval_before")
                self._begin_training()
                limit_s = self._limit_s()
                while not (end := self._end(limit_s)):
                    if held_out := await self._evaluate_between(session):
                        if end := self._end_after(held_out):
                            return self._result(session, before, held_out, end)
                        self.observer.on_phase("train", self.config.episodes_per_step)
                        self.instruments.begin()
                    self.folder.checkpoints.check()
                    with self.instruments.step(self.progress.step + 1):
                        async with self._next_step(session) as step:
                            await finish_uninterrupted(step)  # an interrupt waits until weights and files agree
                    if self.progress.step % self.config.checkpoint.every == 0:
                        await self.folder.checkpoints.ready()
                        session.save()
                session.save()
                await session.player.end_stream()
                after = await self._evaluate(session, "eval_after")
            except asyncio.CancelledError:
                return self._result(session, before, after, "interrupted")
            return self._result(session, before, after, end)

    @asynccontextmanager
    async def _next_step(self, session: TrainingSession) -> AsyncIterator[Coroutine[object, object, None]]:
        """Plays the episodes of a step and yields what learns from them, or from the next rows of a lesson."""
        if self.lesson is not None:
            yield lesson_step(session, self.lesson)
            return
        started = time.perf_counter()
        with self.instruments.doing("generate"):
            groups = await self._play_groups(session)
            greedy = await self._play_greedy(session, groups.kept)
        async with self._evaluation_beside(session) as evaluation:
            times = {"started": started, "played": time.perf_counter()}
            yield learn_step(session, groups, greedy, **times, evaluation=evaluation)

    async def _open(self, stack: AsyncExitStack) -> TrainingSession:
        """Opens the parts of the run; the stack closes them, the last one first."""
        self.folder.lock.take()
        stack.callback(self.folder.close)
        if not self.progress.step:
            seed_random(self.config.seed)
        try:
            parts, player, publisher, gate = await self._open_parts(stack)
        except BaseException:
            if self.checkpoint is None:  # its folder may be used again
                self.folder.abandon()
            raise
        stack.enter_context(self.instruments.tracking_from(self.progress.step))
        discard_digests(self.folder.path)
        writer = stack.enter_context(EpisodeWriter(self.folder.path, **asdict(self.config.record)))
        writer.rewind(self.progress.step if self.checkpoint else -1)
        return TrainingSession(
            config=self.config,
            folder=self.folder,
            model_folder=self.model_folder,
            renderer=self.renderer,
            source=self.source,
            instruments=self.instruments,
            watch=self.watch,
            observer=self.observer,
            progress=self.progress,
            engine=parts.engine,
            learner=parts.learner,
            player=player,
            publisher=publisher,
            gate=gate,
            writer=writer,
        )

    async def _open_parts(self, stack: AsyncExitStack) -> tuple[RunParts, Player, WeightPublisher, ParityGate]:
        """Opens engine, learner and player, sends the weights, and checks the engine's logprobs."""
        config, step = self.config, self.progress.step
        weights = self.checkpoint.path if self.checkpoint else self.model_folder
        origin = Origin(self.model, self.renderer, self.model_folder, weights, step, self.folder.path)
        for line in self.lesson.report if self.lesson else ():
            self._show(line)
        parts = await open_parts(config, origin, stack, self._show, self.instruments.meter_engine)
        stack.callback(self.folder.checkpoints.close)  # what is being written may need the parts
        if self.checkpoint:
            parts.weights.load(self.checkpoint.path)
        configured = config.reward if self.reward is None else replace(config.reward, function=None)
        rewards = await stack.enter_async_context(open_rewards(configured, self.reward))
        sources = Sources(self.source, self.held_out)
        player, lines = await open_player(config, parts.stage, sources, rewards, self.folder.path, stack)
        for line in lines:
            self._show(line)
        if backend := backend_line(self.model, self.model_folder):
            self._show(backend)
        if sum(parameter.numel() for parameter in self.model.parameters()) >= BIG:
            self._show(f"{config.optimizer.name} at a learning rate of {config.optimizer.peak_rate:g}")
        publisher = WeightPublisher(parts.weights, player, self.instruments)
        gate = ParityGate(config.parity, parts, player, publisher, is_mixture=bool(self.model.routers))
        if self.lesson is not None:
            stack.callback(self.lesson.close)
            return parts, player, publisher, gate
        await parts.engine.pause()
        await publish(parts.engine, publisher, step, is_paused=True)
        await gate.start(step)
        return parts, player, publisher, gate

    def _show(self, line: str) -> None:
        self.observer.on_phase(line, 0)

    def _begin_training(self) -> None:
        self.observer.on_phase("train", self.config.episodes_per_step)
        if self.checkpoint and self.checkpoint.step == self.progress.step:
            set_random_states(self.checkpoint.random)
        self.instruments.begin()

    def _limit_s(self) -> float:
        """Returns the seconds of training, counted from the run's first step, after which no step begins."""
        return self.progress.train_s + self.config.max_minutes * 60 if self.config.max_minutes else float("inf")

    def _end(self, limit_s: float) -> RunEnd | None:
        """Returns the reason why no step follows; None if one does."""
        if self.progress.stalled:
            return self.progress.stalled
        if self.progress.step >= self.config.steps:
            return "steps"
        if self.progress.train_s >= limit_s:
            return "max_minutes"
        return "solved" if self.watch.is_finished else None

    async def _evaluate_between(self, session: TrainingSession) -> EvalScore | None:
        """Plays the held-out tasks if the last step succeeded as often as the target, or if they are due.

        Those that are due are left to `_evaluation_beside` if the engine computes beside the learner.
        """
        config = self.config
        is_near = config.target_success is not None and is_target_near(self.watch.successes, config.target_success)
        is_due = self._is_evaluation_due()
        if is_near or (is_due and self.folder.checkpoints.best_is_held_out):
            session.save()
        if not is_near and (not is_due or config.evaluates_while_learning):
            return None
        return await self._evaluate(session, "eval_during", may_be_last=True)

    def _is_evaluation_due(self) -> bool:
        step, every = self.progress.step, self.config.eval.every
        return step > 0 and every > 0 and step % every == 0

    @asynccontextmanager
    async def _evaluation_beside(self, session: TrainingSession) -> AsyncIterator[asyncio.Task[None] | None]:
        """Starts the evaluation that is due and was not played yet, if the engine computes beside the learner."""
        is_due = self._is_evaluation_due() and self.progress.held_out is None
        if not is_due or not self.config.evaluates_while_learning:
            yield None
            return
        evaluation = asyncio.create_task(self._evaluate_beside(session))
        try:
            yield evaluation
        finally:
            evaluation.cancel()
            await asyncio.wait([evaluation])

    async def _evaluate_beside(self, session: TrainingSession) -> None:
        """Plays the held-out tasks with the weights that the step before learned."""
        scored = await self._evaluate(session, "eval_during")
        self.observer.on_phase("train", self.config.episodes_per_step)
        self.progress.stalled = self._end_after(scored) if scored else None

    def _end_after(self, held_out: EvalScore) -> RunEnd | None:
        """Returns the reason why this evaluation during training ends it; None if it does not."""
        target, patience = self.config.target_success, self.config.eval.patience
        if target is not None and held_out.success >= target:
            return "target_success"
        lines = self._lines_with(held_out) if patience else []
        scores = [(line["eval_success"], line["eval_reward_mean"]) for line in lines if "eval_success" in line]
        return "patience" if patience and has_stalled(scores, patience) else None

    def _lines_with(self, held_out: EvalScore) -> list[dict[str, Any]]:
        """Returns the lines of `metrics.jsonl`, and the evaluation after the last step as one more."""
        return [*self.folder.steps(), {"step": held_out.step + 1, **held_out.to_metrics()}]

    async def _play_groups(self, session: TrainingSession) -> StepGroups:
        step = self.progress.step + 1
        try:
            played = await session.player.groups(step)
        except TooManyFailures as failures:
            path = await asyncio.to_thread(keep_episodes, self.folder.path, step, failures.played)
            logger.warning("what was played of step %d is in %s", step, path)
            raise
        trajectories = [trajectory for group in played.groups for trajectory in group.trajectories]
        session.gate.check_versions(trajectories, self.progress.step, staleness=self.config.max_staleness)
        return played

    async def _play_greedy(self, session: TrainingSession, groups: Sequence[Group]) -> Mapping[str, float]:
        """Plays greedy episodes of the groups' tasks and returns their rewards, if the estimator needs them."""
        if not needs_input(self.config.estimator, "greedy_B"):
            return {}
        played = await session.player.greedy(groups, self.progress.step + 1)
        await session.writer.append(played, phase="greedy", step=self.progress.step + 1)
        return {trajectory.group: trajectory.reward for trajectory in played if trajectory.reward is not None}

    async def _evaluate(self, session: TrainingSession, phase: Phase, *, may_be_last: bool = False) -> EvalScore | None:
        """Plays the held-out tasks; returns None if there are none.

        With `may_be_last`, an evaluation that ends training is recorded as the one after it.
        """
        if not self.config.eval.episodes:
            return None
        player, step = session.player, self.progress.step
        if self.lesson is not None:
            await publish(session.engine, session.publisher, step)
        episodes = player.held_out_episodes(phase)
        self.observer.on_phase(phase, len(episodes))
        trajectories = await player.evaluate(episodes, self.observer.on_episode)
        scored = score(step, trajectories, self.held_out.label)
        if may_be_last and self._end_after(scored):
            phase = "eval_after"
        await session.writer.append(trajectories, phase=phase, step=step)
        if self.folder.checkpoints.best_is_held_out:
            await self.folder.checkpoints.ready()
            self.folder.checkpoints.name_best(self._lines_with(scored))
        self.progress.held_out = scored
        return self.instruments.log_score(scored)

    def _recorded_score(self, phase: str) -> EvalScore | None:
        """Returns the score of an evaluation that was recorded before the run was resumed."""
        records = takewhile(lambda record: record.phase == phase, read_episodes(self.folder.path))
        trajectories = [record.trajectory for record in records]
        return score(0, trajectories, self.held_out.label) if trajectories else None

    def _result(
        self, session: TrainingSession, before: EvalScore | None, after: EvalScore | None, end: RunEnd
    ) -> TrainResult:
        progress = self.progress
        checkpoint = session.save() if progress.step and progress.is_between_steps else None
        self.folder.checkpoints.wait()
        self.folder.finish_record(session.writer.head)
        return TrainResult(
            folder=self.folder.path,
            checkpoint=checkpoint,
            steps=progress.step,
            before=before,
            after=after,
            train_s=progress.train_s,
            peak_memory_mb=peak_memory_mb(),
            end=end,
        )
