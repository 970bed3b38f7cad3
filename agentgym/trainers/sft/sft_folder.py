"""The output folder of learning from rows or pairs: a model folder, with the settings and metrics of the run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from safetensors import SafetensorError

from agentgym.chat_templates import Renderer
from agentgym.errors import RunFolderError
from agentgym.model.model_folder import save_model_folder, write_model
from agentgym.rollout.record.folder_lock import FolderLock
from agentgym.rollout.record.manifest import replace_file
from agentgym.trainers.checkpoints.checkpoint import Checkpoint, Snapshot, copy_tokenizer, newest_whole
from agentgym.trainers.checkpoints.writer import Checkpoints
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.tracking import TrackingConfig
from agentgym.trainers.sft.lesson_state import LessonState
from agentgym.trainers.trackers.protocol import TrackedRun
from agentgym.trainers.trackers.tracking import Tracking
from agentgym.types import JSON
from agentgym.yaml_text import parse_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["SftFolder"]


_FREE = ("agentgym", "steps", "epochs", "checkpoint_minutes", "trackers", "project")
"""The settings that a resumed run may have others of."""


class SftFolder:
    """A folder with `config.yaml` and `metrics.jsonl` from the start, and the model and tokenizer once saved.

    Until then it has a checkpoint, if learning takes long.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, JSON],
        *,
        resume: bool = False,
        minutes: float | None = None,
        tracking: Tracking | None = None,
        is_writer: bool = True,
    ) -> None:
        """Makes a new folder, or opens that of a run to `resume`, at its newest checkpoint.

        A checkpoint is written every so many `minutes`, 0 for each step; None writes none. `tracking` gets the numbers
        of the steps too. One that `is_writer` writes for all ranks; those of the others only read what is there.
        Raises RunFolderError if `path` exists and is not an empty folder, or has no such run, or one with other
        settings, or if another process writes in it.
        """
        self.path, self._settings = path, settings
        self._tracking = tracking or Tracking((), TrackingConfig())
        self.recorded: list[dict[str, Any]] = []
        """The lines of metrics.jsonl up to the checkpoint."""
        self.checkpoint: Checkpoint | None = None
        self._every_s = None if minutes is None else 60 * minutes
        self._saved_s = time.monotonic()
        self._checkpoints = Checkpoints(path, CheckpointConfig(every=1, keep=1, keep_best=None))
        self._is_writer = is_writer
        self._lock = FolderLock(path)
        if not is_writer:
            self._read(newest_whole(path) if resume else None)
            return
        with self._convert_errors():
            if resume:
                self._reopen(settings)
                return
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise RunFolderError(f"{str(path)!r} is taken already: give another --output, or remove it")
            path.mkdir(parents=True, exist_ok=True)
            self._lock.take()
            replace_file(path / "config.yaml", yaml.safe_dump(dict(settings), sort_keys=False))

    def _reopen(self, settings: Mapping[str, JSON]) -> None:
        self._lock.take()
        try:
            stored = parse_yaml((self.path / "config.yaml").read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunFolderError(f"{str(self.path / 'config.yaml')!r} cannot be read: {error}") from error
        if not isinstance(stored, dict):
            raise RunFolderError(f"{str(self.path)!r} has no settings in its config.yaml")
        if "learner" not in stored:
            remedy = f"begin a new one with its weights, --model {self.path}"
            raise RunFolderError(f"{str(self.path)!r} is of an earlier version, and cannot be resumed: {remedy}")
        changed = [name for name in settings if name not in _FREE and stored.get(name) != settings[name]]
        if changed:
            diff = "; ".join(f"{name}: {stored.get(name)!r} there, {settings[name]!r} here" for name in changed)
            raise RunFolderError(f"{str(self.path)!r} has other settings ({diff}); resume with the same ones")
        self.checkpoint = self._checkpoints.resume()
        if self.checkpoint is None and (self.path / "model.safetensors").exists():
            ended = "it has learned all its steps, or ended before its first checkpoint"
            raise RunFolderError(f"{str(self.path)!r} has no checkpoint to go on from: {ended}")
        replace_file(self.path / "metrics.jsonl", "".join(f"{line}\n" for line in self._read(self.checkpoint)))

    def _read(self, checkpoint: Checkpoint | None) -> list[str]:
        """Reads the lines of metrics.jsonl up to the checkpoint, and returns them."""
        self.checkpoint, metrics = checkpoint, self.path / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if checkpoint and metrics.exists() else []
        kept = lines[: checkpoint.step if checkpoint else 0]
        self.recorded = [json.loads(line) for line in kept]
        return kept

    def save_state(self, state: LessonState, source: Path, renderer: Renderer, *, at_once: bool = False) -> bool:
        """Starts to write a checkpoint, if one is due on any rank or wanted `at_once`; returns whether it did.

        `source` has the tokenizer, `renderer` the stop ids.
        """
        now = time.monotonic()
        if self._every_s is None or not state.num_done:
            return False
        if not state.agree(at_once or now - self._saved_s >= self._every_s):
            return False
        self._checkpoints.wait()
        self._saved_s = now
        content = state.copy()
        if self._is_writer:
            snapshot = Snapshot(
                step=state.num_done, content=content, tokenizer=source, renderer=renderer, tasks={}, random={}
            )
            self._checkpoints.save(snapshot, ())
        return True

    @property
    def saves(self) -> bool:
        """Returns whether checkpoints are written."""
        return self._every_s is not None

    def close(self) -> None:
        """Waits until the last checkpoint is written, and lets other processes write."""
        self._checkpoints.close()
        self._lock.release()

    def write_metrics(self, step: DataclassInstance) -> None:
        """Appends one step's line: the fields of its report; trackers get them too."""
        if not self._is_writer:
            return
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(step).items()}
        with self._convert_errors(), open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(rounded) + "\n")
        self._tracking.step(int(rounded["step"]), rounded)

    @contextmanager
    def tracking_from(self, step: int) -> Iterator[None]:
        """Has the trackers follow the steps after `step`."""
        if not self._is_writer:
            yield
            return
        name, project = self.path.resolve().name, self._tracking.config.project
        run = TrackedRun(name=name, project=project, folder=self.path, config=self._settings, step=step)
        with self._tracking.following(run):
            yield

    def save_model(self, state: LessonState, source: Path, renderer: Renderer, *, is_last: bool) -> None:
        """Writes the model, with the tokenizer's files of the folder `source`; the last replaces the checkpoints."""
        gathered = None if state.ranks is None else state.rounded_weights()
        if not self._is_writer:
            return
        with self._convert_errors():
            if gathered is None:
                save_model_folder(state.model, self.path)
            else:
                write_model(state.model.to_hf(), gathered, self.path)
            copy_tokenizer(source, self.path, renderer)
            if is_last:
                self._checkpoints.close()
                shutil.rmtree(self.path / "checkpoints", ignore_errors=True)

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Converts errors of the file system to RunFolderErrors that name the folder."""
        try:
            yield
        except RunFolderError:
            raise
        except (OSError, SafetensorError) as error:
            raise RunFolderError(f"cannot write to {str(self.path)!r}: {error}") from error
