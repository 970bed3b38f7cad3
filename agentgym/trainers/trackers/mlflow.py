"""The tracker of MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from agentgym.settings.config_class import flatten_settings
from agentgym.trainers.trackers.mlflow_names import mlflow_name
from agentgym.trainers.trackers.protocol import ShownEpisode, TrackedRun

__all__ = ["MlflowTracker"]

_PARAMS_AT_ONCE, _LONGEST = 100, 500
"""The most parameters in one request to MLflow, and the most characters of a parameter's text."""


class MlflowTracker:
    """Logs to a run of the experiment named after the project, and continues it when the run is resumed.

    The run is on the server of `MLFLOW_TRACKING_URI`, else in `mlflow/` of the run folder.
    """

    def begin(self, run: TrackedRun) -> None:
        """Starts MLflow's run, or reopens the previous one."""
        home = run.folder.resolve() / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            home.mkdir(exist_ok=True)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{home / 'mlflow.db'}")
        if run_id := run.recall("mlflow"):
            self._id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        artifacts = None if uri else (home / "artifacts").as_uri()
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project, artifacts)
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        run.keep("mlflow", self._id)
        settings = {mlflow_name(name): str(value)[:_LONGEST] for name, value in flatten_settings(run.config).items()}
        params = [Param(name, value) for name, value in settings.items()]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + _PARAMS_AT_ONCE])

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a point of each metric."""
        now_ms = int(time.time() * 1000)
        points = [Metric(mlflow_name(name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=points)

    def episodes(self, step: int, sample: Sequence[ShownEpisode]) -> None:
        """Logs an artifact `episodes/step-NNNNNN.json`, which MLflow shows as a table."""
        cells = zip(*(episode.cells for episode in sample), strict=True)
        table = dict(zip(ShownEpisode.columns(), map(list, cells), strict=True))
        self._client.log_table(self._id, table, f"episodes/step-{step:06d}.json")

    def finish(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id)
