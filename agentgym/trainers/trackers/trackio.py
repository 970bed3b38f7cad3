"""The tracker of trackio: a local database with a dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trackio

from agentgym.trainers.trackers.protocol import ShownEpisode, TrackedRun

__all__ = ["TrackioTracker"]


class TrackioTracker:
    """Logs to a run of trackio, and continues it when the run is resumed; `trackio show` draws it.

    It is stored in trackio's own location (`TRACKIO_DIR`, `TRACKIO_SPACE_ID`).
    """

    def begin(self, run: TrackedRun) -> None:
        """Starts trackio's run, or reopens the previous one."""
        recorded_name = run.recall("trackio")
        self._run = trackio.init(
            project=run.project,
            name=recorded_name or run.name,
            config=dict(run.config),
            resume="must" if recorded_name else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        run.keep("trackio", self._run.name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a row of numbers."""
        self._run.log(dict(metrics), step=step)

    def episodes(self, step: int, sample: Sequence[ShownEpisode]) -> None:
        """Logs a table named `episodes`."""
        table = trackio.Table(columns=ShownEpisode.columns(), data=[episode.cells for episode in sample])
        self._run.log({"episodes": table}, step=step)

    def finish(self) -> None:
        """Writes the remaining entries."""
        self._run.finish()
