"""The public face of a training run: `Trainer(config).fit()`."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.base.text_env import TextEnv
from agentgym.errors import ConfigError
from agentgym.loading import code_path_of
from agentgym.model.language_model import LanguageModel
from agentgym.model.policy import load_policy
from agentgym.notebook.html_view import html_curves, html_table, short_text
from agentgym.rewards import RewardFunction
from agentgym.rollout.hosting.event_loop import loop_runner
from agentgym.rollout.hosting.watchdog import watch_calls
from agentgym.settings.config_class import config_from_mapping
from agentgym.tools.sandbox.service_settings import used_by_run
from agentgym.trainers.checkpoints.checkpoint import newest_whole
from agentgym.trainers.checkpoints.run_folder import RunFolder, free_run_folder, read_settings, save_model
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.lessons.config import config_kind
from agentgym.trainers.lessons.lesson import Lesson
from agentgym.trainers.loop.fit_progress import FitProgress
from agentgym.trainers.loop.observer import Observer, Observers, own_observers
from agentgym.trainers.loop.open_run import open_run
from agentgym.trainers.loop.train_result import TrainResult
from agentgym.trainers.parts.parts import LearnerLost
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
            config = replace(config, env=code_path_of(env))
        if reward is not None:
            config = replace(config, reward=replace(config.reward, function=code_path_of(reward)))
        own = own_observers(config.observers)
        self._progress = FitProgress()
        first: Observer = observer or self._progress
        self.observer = Observers([first, *own]) if own else first
        self.reward = None if isinstance(reward, str) else reward
        path = free_run_folder(config) if output is None else Path(output)
        with used_by_run(config.sandbox):
            self._run = open_run(config, path, self.observer, self.reward, resume=resume)

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

        `changes` are settings that a resumed run may change: steps, max_minutes, eval, target_success,
        collapse, checkpoint, speed, profile, trackers, tracking. Raises RunFolderError for a folder without a run,
        ConfigError for other changes.
        """
        settings = read_settings(Path(folder))
        return cls(
            config_from_mapping(config_kind(settings), {**settings, **changes}),
            folder,
            observer,
            reward=reward,
            resume=True,
        )

    @property
    def config(self) -> TrainConfig:
        """The complete settings, as they are recorded."""
        return self._run.config

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return self._run.folder

    @property
    def model(self) -> LanguageModel:
        """The model that is trained, with its adapters merged.

        Of a run on Ray, and of a lesson with adapters, it is that of the newest checkpoint, loaded by each call.
        """
        if not self._run.model.embed.is_meta and not self.config.adapts_in_place:
            return self._run.model
        newest = newest_whole(self.folder.path) if self.folder.has_run else None
        folder = self._run.model_folder if newest is None else newest.path
        return load_policy(folder, dtype=self.config.learner.compute_dtype, backend=self.config.model_backend)

    @property
    def lesson(self) -> Lesson[object] | None:
        """The rows or pairs that the run learns from in place of episodes; None for a run that plays."""
        return self._run.lesson

    @property
    def renderer(self) -> Renderer:
        """The chat template of the run."""
        return self._run.renderer

    @property
    def metrics(self) -> list[dict[str, JSON]]:
        """The lines of `metrics.jsonl` so far, resumed steps included: `pandas.DataFrame(trainer.metrics)`."""
        return self.folder.steps()

    def __repr__(self) -> str:
        where = f"{self.folder.path}: step {self._run.progress.step} of {self.config.steps}"
        return short_text(f"<Trainer {where}, {self.config.algo} on {self.config.subject}, {self.config.model}>")

    def _repr_html_(self) -> str:
        """Returns the run with its learning curve."""
        names = ("loss",) if self.config.is_lesson else ("success", "eval_success")
        return html_table(repr(self), [], html_curves({name: self._curve(name) for name in names}))

    def _curve(self, name: str) -> list[tuple[float, float]]:
        """Returns the points (step, value) of a number of `metrics`."""
        return [
            (step, value)
            for line in self.metrics
            if isinstance(step := line["step"], int) and isinstance(value := line.get(name), int | float)
        ]

    def fit(self, *, progress: bool = True) -> TrainResult:
        """Plays and learns until the steps are done; a second call does nothing more.

        Progress is a curve in a notebook, and lines on standard error in a script, unless `progress` is false, or the
        trainer has an observer that shows it.
        Ctrl-C stops after the current operation, with a checkpoint of the last complete step; a second Ctrl-C stops at
        once, with what was written before. A learner that lost a rank restarts from the newest checkpoint.
        """
        if progress:
            self._progress.start(self.config, self._run.progress.step)
        for left in reversed(range(self.config.ray.max_restarts + 1)):
            try:
                with used_by_run(self.config.sandbox), watch_calls(self._stall_s):
                    return loop_runner()(self._run.fit())
            except LearnerLost as lost:
                if not left or not self.folder.has_run:
                    raise
                self._run = open_run(self.config, self.folder.path, self.observer, self.reward, resume=True)
                logger.warning("%s; the run goes on after step %d", lost, self._run.progress.step)
        raise AssertionError("the last try returns or raises")

    @property
    def _stall_s(self) -> float | None:
        """The limit for environments of this process; None if they all run in others."""
        are_elsewhere = self.config.executor == "ray" or self.config.sampler.env_processes
        return None if are_elsewhere else self.config.limits.stall_s

    def save(self, folder: str | Path) -> Path:
        """Writes the current model and its tokenizer, in the format that `transformers` and agentgym load."""
        return save_model(self.model, Path(folder), self._run.model_folder, self.renderer)
