"""The tracker of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import wandb

from agentgym.errors import ConfigError
from agentgym.trainers.trackers.protocol import ShownEpisode, TrackedRun

__all__ = ["WandbTracker"]


class WandbTracker:
    """Logs to a run of Weights & Biases, and continues it when the run is resumed.

    Offline (`WANDB_MODE=offline`, `wandb offline`) its files stay in the run folder until `wandb sync`. Entity and key
    are those of `wandb login`.
    """

    def __init__(self) -> None:
        is_online = wandb.setup().settings.mode not in ("offline", "disabled", "dryrun")
        if is_online and not wandb.login(prompt=False):
            raise ConfigError(
                "the tracker wandb has no key of Weights & Biases: run `wandb login`, set WANDB_API_KEY, or set"
                " WANDB_MODE=offline to keep its files in the run folder"
            )

    def begin(self, run: TrackedRun) -> None:
        """Starts W&B's run, or reopens the previous one."""
        run_id = run.recall("wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            id=run_id,
            resume="allow" if run_id else None,
            settings=wandb.Settings(console="off", quiet=True),
        )
        run.keep("wandb", self._run.id)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a point of history.

        W&B takes steps in order only, so steps that a resumed run plays again keep their first numbers.
        """
        if step >= self._run.step:
            self._run.log(dict(metrics), step=step)

    def episodes(self, step: int, sample: Sequence[ShownEpisode]) -> None:
        """Logs a table named `episodes`."""
        if step >= self._run.step:
            table = wandb.Table(columns=list(ShownEpisode.columns()), data=[episode.cells for episode in sample])
            self._run.log({"episodes": table}, step=step)

    def finish(self) -> None:
        """Sends the remaining entries."""
        self._run.finish()
