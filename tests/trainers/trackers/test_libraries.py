"""The wrapped libraries, read back with their own readers.

All but TensorBoard's are too heavy to be installed for every test: `pip install '.[trackers]'`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentgym.trainers.trackers import ShownEpisode, TrackedRun, open_tracker

WHY = "the library of this tracker is not installed: pip install '.[trackers]'"


def followed(name: str, tmp_path: Path, step: int = 0, last: int = 2) -> None:
    """A run of steps up to `last`, with an episode at each, told to the tracker."""
    episode = ShownEpisode(
        step=1,
        group="1/0",
        member=0,
        env="TextGame-v0",
        prompt="Go.",
        replies="```Went.",
        reward=None,
        success=None,
        status="timeout",
        stop_reason="timeout",
    )
    config = {"env": "TextGame-v0", "optimizer": {"name": "adamw"}, "trackers": [name]}
    tracker = open_tracker(name)
    tracker.begin(TrackedRun(name="run", project="agentgym", folder=tmp_path, config=config, step=step))
    for number in range(step + 1, last + 1):
        tracker.step(number, {"success": number / 10, "loss": -1.5, "pass@1": 0.5})
        tracker.episodes(number, [episode, episode])
    tracker.finish()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # those of the libraries
@pytest.mark.parametrize("steps_kept", [2, 1])
def test_tensorboard_has_the_curves_and_forgets_what_is_played_again(tmp_path: Path, steps_kept: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    followed("tensorboard", tmp_path)
    followed("tensorboard", tmp_path, step=steps_kept, last=3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [entry.step for entry in events.Scalars("success")] == [1, 2, 3]
    assert [entry.value for entry in events.Scalars("success")] == pytest.approx([0.1, 0.2, 0.3])
    text = events.Tensors("episodes/1/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "status: timeout" in text and "    Go." in text and "    ```Went." in text
    assert '"adamw"' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


@pytest.mark.filterwarnings("ignore")  # those of the library
def test_wandb_keeps_a_run_offline_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason=WHY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    followed("wandb", tmp_path)
    name = (tmp_path / "trackers" / "wandb.txt").read_text().strip()
    followed("wandb", tmp_path, step=2, last=3)
    assert (tmp_path / "trackers" / "wandb.txt").read_text().strip() == name
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert files and b"success" in files[0].read_bytes()
    (table, *_) = sorted((tmp_path / "wandb").glob("*/files/media/table/episodes*.json"))
    assert json.loads(table.read_text())["columns"] == ShownEpisode.columns()


@pytest.mark.filterwarnings("ignore")  # those of the library
def test_mlflow_keeps_a_run_in_its_folder_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason=WHY)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    followed("mlflow", tmp_path)
    followed("mlflow", tmp_path, step=2, last=3)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("agentgym")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.name"] == "adamw"
    history = client.get_metric_history(run.info.run_id, "success")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert run.data.metrics["pass_1"] == 0.5
    tables = sorted((tmp_path / "mlflow").glob("artifacts/*/artifacts/episodes/step-*.json"))
    assert [table.name for table in tables] == [f"step-00000{step}.json" for step in (1, 2, 3)]


@pytest.mark.filterwarnings("ignore")  # those of the library
def test_trackio_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which it reads when it is imported
    pytest.importorskip("trackio", reason=WHY)
    from trackio.sqlite_storage import SQLiteStorage

    followed("trackio", tmp_path)
    followed("trackio", tmp_path, step=2, last=3)
    entries = [entry for entry in SQLiteStorage.get_logs("agentgym", "run") if "success" in entry]
    assert [(entry["step"], entry["success"]) for entry in entries] == [(1, 0.1), (2, 0.2), (3, 0.3)]
