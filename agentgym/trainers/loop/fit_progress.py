"""The progress of `Trainer.fit`, for a notebook or a script."""

from __future__ import annotations

from agentgym.notebook.progress_view import ProgressView
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.observer import PHASES
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trajectory import Trajectory

__all__ = ["FitProgress"]


class FitProgress:
    """An observer that shows each phase and each step; it is silent until `start`."""

    def __init__(self) -> None:
        self._view = ProgressView("training", is_shown=False)
        self._num_steps, self._step = 0, 0
        self._num_played, self._total, self._num_won = 0, 0, 0

    def start(self, config: TrainConfig, step: int) -> None:
        """Shows what follows, of a run that has taken so many steps."""
        self._view = ProgressView(f"{config.algo} on {config.subject}, seed {config.seed}")
        self._num_steps, self._step = config.steps, step

    def on_phase(self, name: str, episodes: int) -> None:
        """Shows that a phase begins."""
        self._num_played, self._total, self._num_won = 0, episodes, 0
        size = f": {self._num_steps} steps of {episodes} episodes" if name == "train" else f": {episodes} episodes"
        self._view.say(f"{PHASES.get(name, name)}{size if episodes else ''}")

    def on_episode(self, trajectory: Trajectory) -> None:
        """Counts an episode of an evaluation, and shows the success of the whole."""
        self._num_played += 1
        self._num_won += bool(trajectory.success)
        if self._num_played == self._total:
            share = self._num_won / self._total
            self._view.say(f"  success {share:.3f}")
            self._view.add(self._step, **{"held-out success": share})

    def on_step(self, metrics: StepMetrics) -> None:
        """Shows the numbers of a step."""
        self._step = metrics.step
        rollout, update = metrics.rollout, metrics.update
        loss = update.loss if update is not None and update.optimizer_steps else None
        numbers = {} if rollout is None else {"success": rollout.success, "reward": rollout.reward_mean}
        numbers |= {} if loss is None else {"loss": loss}
        line = "  ".join(f"{name} {number:.3f}" for name, number in numbers.items())
        self._view.say(f"step {metrics.step}/{self._num_steps}  {line}  {metrics.elapsed_s:.0f} s")
        curve = {"loss": loss} if rollout is None else {"success": rollout.success}
        self._view.add(metrics.step, **{name: number for name, number in curve.items() if number is not None})
