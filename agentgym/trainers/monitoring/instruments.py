"""The measuring of a run: the clock of its steps, the traces of some, and its trackers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import torch

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Engine
from agentgym.model.language_model import LanguageModel
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.monitoring.metrics import EvalScore, StepMetrics
from agentgym.trainers.speed.clock import Activity, StepClock
from agentgym.trainers.speed.metered import MeteredEngine
from agentgym.trainers.speed.peak import peak_flops
from agentgym.trainers.speed.profile import trace_step
from agentgym.trainers.speed.step_speed import StepSpeed
from agentgym.trainers.speed.work import UpdateWork, update_work
from agentgym.trainers.trackers import TrackedRun, Tracking
from agentgym.trajectory import Group

__all__ = ["Instruments"]


class Instruments:
    """Measures the steps of a run and logs them to its trackers; the run plays and learns the same without it."""

    def __init__(
        self, config: TrainConfig, renderer: Renderer, tracking: Tracking, folder: Path, model: LanguageModel
    ) -> None:
        self.config = config
        self.renderer = renderer
        self.tracking = tracking
        self.folder = folder
        self.model = model
        self.clock = StepClock()
        self.clock.plays_beside = config.max_staleness > 0
        self.clock.hears_engine = config.executor == "local"
        self._work: UpdateWork | None = None

    def meter_engine(self, engine: Engine) -> Engine:
        """Returns the engine, with its requests timed by the clock."""
        return MeteredEngine(engine, self.clock)

    def doing(self, activity: Activity) -> AbstractContextManager[None]:
        """Returns a context manager that times an activity of the step."""
        return self.clock.doing(activity)

    @contextmanager
    def tracking_from(self, step: int) -> Iterator[None]:
        """Returns a context manager that logs the steps after `step` to the trackers."""
        settings = json.loads(json.dumps(asdict(self.config), default=dict))
        name, project = self.folder.resolve().name, self.config.tracking.project
        run = TrackedRun(name=name, project=project, folder=self.folder, config=settings, step=step)
        with self.tracking.following(run):
            yield

    @cached_property
    def _peak_flops(self) -> float | None:
        """The peak operations per second of the learner: those of this process, or of all ranks."""
        config, cluster, weight = self.config, self.config.ray, self.model.embed
        if peak_tflops := config.speed.peak_tflops:
            return peak_tflops * 1e12
        if config.executor == "local":
            return peak_flops(weight.device, weight.dtype, config.learner.num_threads)
        if cluster.learners == 1 and not cluster.gpus_per_learner:
            return peak_flops(torch.device("cpu"), weight.dtype, config.learner.num_threads)
        # A rank of several computes on one core; GPUs of other processes are not known here.
        return None if cluster.gpus_per_learner else peak_flops(torch.device("cpu"), weight.dtype, cluster.learners)

    def begin(self) -> None:
        """Starts the clock of the first step."""
        self.clock.lap()

    def step(self, step: int) -> AbstractContextManager[None]:
        """Returns a context manager for a whole step, which traces the step if it is due."""
        return trace_step(self.config.profile, step, self.folder)

    def record_update(self, batch: TrainingBatch) -> None:
        """Records the work of an update of the policy on the batch."""
        self._work = update_work(batch, self.config.learner, self.model)

    def lap(self, sampled_tokens: int) -> StepSpeed:
        """Returns the speed of the step that ends here."""
        work, self._work = self._work, None
        return StepSpeed.of(self.clock.lap(), sampled_tokens, work, self._peak_flops)

    def log_step(self, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Logs a step's numbers to the trackers and, if due, some of its episodes."""
        self.tracking.step(metrics.step, replace(metrics, held_out=None).to_json())
        played = [trajectory for group in groups for trajectory in group.trajectories]
        self.tracking.episodes(metrics.step, played, self.renderer)

    def log_score(self, score: EvalScore) -> EvalScore:
        """Logs the score of an evaluation to the trackers and returns it."""
        self.tracking.step(score.step, score.to_metrics())
        return score
