"""The training loop: play groups, credit them, update, sync the engine, record."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import cast

from agentgym.chat_templates import renderer_for
from agentgym.chat_templates.template_date import present_date
from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import WeightSync
from agentgym.envs.base.text_env import TextEnv
from agentgym.errors import ConfigError
from agentgym.loading import place_of
from agentgym.model.transformers_check import check_forward
from agentgym.rewards import RewardFunction, open_rewards
from agentgym.rollout.hosting.event_loop import finish_uninterrupted, run_async
from agentgym.rollout.hosting.watchdog import watch_calls
from agentgym.rollout.record.episodes_file import EpisodeWriter, read_episodes
from agentgym.rollout.record.folder_digests import discard_digests
from agentgym.rollout.sampling.sampler import TooManyFailures
from agentgym.trainers.algorithms.estimators import needs_input
from agentgym.trainers.batch.credits import GroupCredit, credit_of_all
from agentgym.trainers.checkpoints.checkpoint import Checkpoint, Snapshot
from agentgym.trainers.checkpoints.random_states import random_states, seed_random, set_random_states
from agentgym.trainers.checkpoints.run_folder import (
    RunFolder,
    free_run_folder,
    read_settings,
    recorded_run_date,
    save_model,
)
from agentgym.trainers.config import TrainConfig, config_from_mapping
from agentgym.trainers.loop.learn_step import LearnStep
from agentgym.trainers.loop.observer import Observer, Unobserved
from agentgym.trainers.loop.open_parts import open_parts
from agentgym.trainers.loop.player import Player
from agentgym.trainers.loop.run_tasks import open_tasks
from agentgym.trainers.loop.token_budget import with_token_budget
from agentgym.trainers.loop.train_result import TrainResult
from agentgym.trainers.monitoring.halt import keep_episodes
from agentgym.trainers.monitoring.instruments import Instruments
from agentgym.trainers.monitoring.metrics import EvalScore, RolloutSummary, StepMetrics, score
from agentgym.trainers.monitoring.parity import ParityGate
from agentgym.trainers.monitoring.watch import CollapseWatch
from agentgym.trainers.parts.engine import load_model, weights_for
from agentgym.trainers.parts.parts import LearnerLost, Origin
from agentgym.trainers.speed.memory import peak_memory_mb
from agentgym.trainers.tasks import StepGroups
from agentgym.trajectory import Group, Trajectory
from agentgym.types import JSON

__all__ = ["Observer", "TrainResult", "Trainer"]

logger = logging.getLogger(__name__)


class Trainer:
    """One run in one process, from its configuration to its checkpoints: `Trainer(config).fit()`.

    `output` is the run's folder, by default a new one under `runs/`. `env`, an environment's class or name, and
    `reward`, a function or its name, replace the configured ones. Both are recorded by name in config.yaml; a run
    with a function that cannot be imported by name is resumed with the function given again.
    """

    def __init__(
        self,
        config: TrainConfig,
        output: str | Path | None = None,
        observer: Observer | None = None,
        *,
        env: type[TextEnv] | str | None = None,
        reward: RewardFunction | str | None = None,
        resume: bool = False,
    ) -> None:
        if not isinstance(config, TrainConfig):
            raise ConfigError(f"a run begins with a TrainConfig(env=...), got {config!r}")
        if env is not None:
            config = replace(config, env=place_of(env))
        if reward is not None:
            config = replace(config, reward=replace(config.reward, function=place_of(reward)))
        self.observer = observer or Unobserved()
        self.reward = None if isinstance(reward, str) else reward
        folder = free_run_folder(config) if output is None else Path(output)
        self.model_folder = embedded_folder() if config.model == "embedded" else Path(config.model)
        date = config.date or (recorded_run_date(folder) if resume else None) or present_date()
        self.renderer = renderer_for(self.model_folder, config.family, date=date)
        written = date if self.renderer.tokenizer.writes_date else config.date
        self.config = with_token_budget(replace(config, family=self.renderer.reply_format.name, date=written))
        self._stand(folder, resume=resume)

    def _stand(self, folder: Path, *, resume: bool) -> None:
        """Loads the run's newest checkpoint, or initializes a new run."""
        config = self.config
        self.source = open_tasks(config, self.renderer)  # raises for what does not exist, before anything is written
        self.instruments = Instruments(config, self.renderer)
        self.checkpoint: Checkpoint | None = None
        source = self.model_folder
        if resume:
            self.folder, self.checkpoint = RunFolder.reopen(folder, config)
            source = self.checkpoint.path if self.checkpoint else source
        self.model = load_model(source, config.learner)
        if not resume:
            check_forward(self.model, source)
        if not resume:
            self.folder = RunFolder.create(folder, config)
        self.step = self.checkpoint.step if self.checkpoint else 0
        if self.checkpoint:
            self.source.load(self.checkpoint.tasks)
        recorded = self.folder.steps() if resume else []
        self.train_s = float(cast(float, recorded[-1]["elapsed_s"])) if recorded else 0.0
        self.watch = CollapseWatch(config.collapse, recorded)
        self._is_between_steps = True
        self.random = random_states()

    @classmethod
    def load(
        cls,
        folder: str | Path,
        observer: Observer | None = None,
        *,
        reward: RewardFunction | str | None = None,
        **changes: object,
    ) -> Trainer:
        """Returns the trainer of a run folder, at its newest checkpoint: `Trainer.load("runs/x", steps=80).fit()`.

        `changes` are settings that a resumed run may change: steps, max_minutes, eval_episodes, collapse,
        checkpoint, speed, profile, trackers, tracking. Raises RunFolderError for a folder without a run, ConfigError
        for other changes.
        """
        settings = read_settings(Path(folder))
        return cls(
            config_from_mapping(TrainConfig, {**settings, **changes}), folder, observer, reward=reward, resume=True
        )

    @property
    def metrics(self) -> list[dict[str, JSON]]:
        """The lines of `metrics.jsonl` so far, resumed steps included: `pandas.DataFrame(trainer.metrics)`."""
        return self.folder.steps()

    def fit(self) -> TrainResult:
        """Plays and learns until the steps are done; a second call does nothing more.

        Ctrl-C stops after the current operation, with a checkpoint of the last complete step; a second Ctrl-C stops at
        once, with what was written before. A learner that lost a rank restarts from the newest checkpoint.
        """
        for left in reversed(range(self.config.ray.max_restarts + 1)):
            try:
                with watch_calls(self.config.limits.stall_s):
                    return run_async(self._run())
            except LearnerLost as lost:
                if not left or not self.folder.has_run:
                    raise
                self._stand(self.folder.path, resume=True)
                logger.warning("%s; the run goes on after step %d", lost, self.step)
        raise AssertionError("the last try returns or raises")

    def save(self, folder: str | Path) -> Path:
        """Writes the current model and its tokenizer, in the format that `transformers` and agentgym load."""
        return save_model(self.model, Path(folder), self.model_folder)

    async def _run(self) -> TrainResult:
        async with AsyncExitStack() as stack:
            self.folder.lock.take()
            stack.callback(self.folder.close)
            if not self.step:
                seed_random(self.config.seed)
            await self._begin(stack)
            stack.enter_context(self.instruments.watching(self.folder.path, self.model, self.step))
            discard_digests(self.folder.path)
            self.writer = stack.enter_context(EpisodeWriter(self.folder.path))
            self.writer.rewind(self.step if self.checkpoint else -1)
            before = after = None
            try:
                before = self._recorded_score("eval_before") if self.checkpoint else await self._evaluate("eval_before")
                await self._train()
                after = await self._evaluate("eval_after")
            except asyncio.CancelledError:
                return self._result(before, after, interrupted=True)
            return self._result(before, after)

    async def _begin(self, stack: AsyncExitStack) -> None:
        """Creates the parts of the run and checks the engine; a new run that fails here frees its folder."""
        try:
            await self._open(stack)
            await self._check_engine()
        except BaseException:
            if self.checkpoint is None:
                self.folder.abandon()
            raise

    async def _open(self, stack: AsyncExitStack) -> None:
        """Creates the parts of the run; the stack closes them, the last one first."""
        config = self.config
        weights = self.checkpoint.path if self.checkpoint else self.model_folder
        logs = self.folder.path / "servers"
        origin = Origin(self.model, self.renderer, self.model_folder, weights, self.step, logs)
        parts = await open_parts(config, origin, stack, self._tell, self.instruments.meter_engine)
        self.engine, self.learner = parts.engine, parts.learner
        if self.checkpoint:
            self.learner.load_state_dict(self.checkpoint.learner_state())
        named = config.reward if self.reward is None else replace(config.reward, function=None)
        rewards = await stack.enter_async_context(open_rewards(named, self.reward))
        self.player = Player(config, parts.stage, self.source, rewards)
        await self.player.open(stack, self._on_served)
        self.gate = ParityGate(config.parity, self.engine, self.learner, self._play_probe, self._publish)
        self.learning = LearnStep(
            config=config,
            folder=self.folder.path,
            engine=self.engine,
            learner=self.learner,
            gate=self.gate,
            watch=self.watch,
            instruments=self.instruments,
            publish=self._publish,
            save=self._save,
        )

    def _tell(self, line: str) -> None:
        self.observer.on_phase(line, 0)

    def _on_served(self, url: str, token: str | None) -> None:
        self._tell(f"serving the episodes of training at {url}")
        if token is not None:
            self._tell(f"token: {token}    (agents send it as their API key)")

    async def _check_engine(self) -> None:
        """Sends the weights, and compares the engine's logprobs with the learner's."""
        await self.engine.pause()
        await self._publish()
        await self.engine.resume()
        await self.gate.start(self.step)

    async def _train(self) -> None:
        config = self.config
        self.observer.on_phase("train", config.episodes_per_step)
        checkpoints = self.folder.checkpoints
        if self.checkpoint and self.checkpoint.step == self.step:
            set_random_states(self.checkpoint.random)
        self.instruments.begin()
        limit_s = self.train_s + config.max_minutes * 60 if config.max_minutes else float("inf")
        while self.step < config.steps and self.train_s < limit_s and not self.watch.is_finished:
            checkpoints.check()
            await self._train_step()
            if self.step % config.checkpoint.every == 0:
                await checkpoints.ready()
                self._save()
        self._save()

    async def _train_step(self) -> None:
        with self.instruments.step(self.step + 1):
            started = time.perf_counter()
            with self.instruments.doing("generate"):
                groups = await self._play_groups()
                greedy = await self._play_greedy(groups.kept)
            await finish_uninterrupted(self._finish_step(groups, greedy, started, time.perf_counter()))

    async def _finish_step(
        self, step_groups: StepGroups, greedy: Mapping[str, float], started: float, played: float
    ) -> None:
        """Learns from the groups and records the step; an interrupt waits until weights and files agree."""
        self._is_between_steps = False  # a second Ctrl-C does not wait, and may leave the weights half updated
        kept, groups = step_groups.kept, step_groups.groups
        with self.instruments.doing("learn"):
            learned_from = await self.learning.credit(self.step, kept, greedy)
            stats, critic, sync = await self.learning.learn(self.step, kept, learned_from)
        advantages = credit_of_all(groups, kept, learned_from)
        learned = time.perf_counter()
        self.step += 1
        self.train_s += learned - started
        self._record(groups, advantages)
        self.source.finish(self.step, groups)
        rollout = RolloutSummary.of(groups, advantages)
        waits = self.player.metrics(groups, self.step - 1)
        metrics = StepMetrics(
            step=self.step,
            rollout=rollout,
            update=stats,
            critic=critic,
            sync=sync,
            generate_s=played - started,
            update_s=learned - played,
            elapsed_s=self.train_s,
            speed=self.instruments.lap(rollout),
            practice={**step_groups.metrics(), **self.source.metrics(), **waits},
        )
        metrics = self.watch.see(metrics)
        self.folder.write_metrics(metrics, self.writer.head)
        self.observer.on_step(metrics)
        self.instruments.tell(metrics, groups)
        if halt := self.watch.halt:
            self.random = random_states()
            self._save()
            raise halt
        await self.gate.check(self.step, self.step)
        self.random = random_states()
        self._is_between_steps = True

    async def _play_groups(self) -> StepGroups:
        try:
            played = await self.player.groups(self.step + 1)
        except TooManyFailures as halted:
            kept = keep_episodes(self.folder.path, self.step + 1, halted.played)
            logger.warning("what was played of step %d is in %s", self.step + 1, kept)
            raise
        self.gate.check_versions(
            [trajectory for group in played.groups for trajectory in group.trajectories],
            self.step,
            staleness=self.config.max_staleness,
        )
        return played

    async def _play_greedy(self, groups: Sequence[Group]) -> dict[str, float]:
        """Plays greedy episodes of the groups' tasks and returns their rewards, if the estimator needs them."""
        if not needs_input(self.config.estimator, "greedy_B"):
            return {}
        played = await self.player.greedy(groups, self.step + 1)
        self.writer.write(played, phase="greedy", step=self.step + 1)
        return {trajectory.group: trajectory.reward for trajectory in played if trajectory.reward is not None}

    async def _play_probe(self, name: str) -> list[Trajectory]:
        return await self.player.probe(name, self.step)

    async def _publish(self, version: int | None = None) -> WeightSync:
        """Sends the current weights to the engine, as `version` or else as the current step."""
        wanted = self.step if version is None else version
        with self.instruments.doing("sync"):
            sync = await self.engine.update_weights(weights_for(self.engine, self.model), wanted)
        self.player.on_publish(wanted)
        return sync

    def _record(self, groups: Sequence[Group], advantages: Sequence[GroupCredit]) -> None:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        members = [member for credit in advantages for member in credit.members]
        per_token = [None if member is None else [row.tolist() for row in member] for member in members]
        self.writer.write(trajectories, phase="train", step=self.step, advantages=per_token)

    async def _evaluate(self, phase: str) -> EvalScore | None:
        """Plays the held-out tasks with the sampling of training; returns None if there are none."""
        if not self.config.eval_episodes:
            return None
        self.observer.on_phase(phase, len(self.source.eval_tasks(self.config.eval_episodes)))
        trajectories = await self.player.evaluate(phase, self.observer.on_episode)
        self.writer.write(trajectories, phase=phase, step=self.step)
        return self.instruments.tell_score(score(self.step, trajectories, self.source.label))

    def _recorded_score(self, phase: str) -> EvalScore | None:
        """Returns the score of an evaluation that was recorded before the run was resumed."""
        records = takewhile(lambda record: record.phase == phase, read_episodes(self.folder.path))
        trajectories = [record.trajectory for record in records]
        return score(0, trajectories, self.source.label) if trajectories else None

    def _save(self) -> Path:
        """Starts to write the checkpoint of the last complete step, if there is none."""
        checkpoints = self.folder.checkpoints
        if checkpoints.holds(self.step):
            return checkpoints.path_of(self.step)
        states = {"tasks": self.source.state(), "random": self.random, "record": self.folder.heads}
        learner = self.learner.state_dict()
        snapshot = Snapshot.of(self.step, self.model, learner, tokenizer=self.model_folder, **states)
        return checkpoints.save(snapshot, self.folder.steps())

    def _result(self, before: EvalScore | None, after: EvalScore | None, *, interrupted: bool = False) -> TrainResult:
        checkpoint = self._save() if self.step and self._is_between_steps else None
        self.folder.checkpoints.wait()
        self.folder.finish_record(self.writer.head)
        return TrainResult(
            folder=self.folder.path,
            checkpoint=checkpoint,
            steps=self.step,
            before=before,
            after=after,
            train_s=self.train_s,
            peak_memory_mb=peak_memory_mb(),
            interrupted=interrupted,
        )
