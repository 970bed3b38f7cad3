"""The folder of a training run: its configuration, its metrics, its checkpoints."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from agentgym.chat_templates import Renderer
from agentgym.envs.catalog.resolve import stem_of
from agentgym.errors import NOT_JSON, ConfigError, RunFolderError
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import save_model_folder
from agentgym.rollout.record.chain import CHAIN, ChainedFile
from agentgym.rollout.record.environments_file import ENVIRONMENTS, record_environments
from agentgym.rollout.record.folder_digests import discard_digests, file_digest, write_digests
from agentgym.rollout.record.folder_lock import FolderLock
from agentgym.rollout.record.manifest import replace_file
from agentgym.rollout.record.settings_file import settings_text
from agentgym.settings.config_class import config_from_mapping, flatten_settings
from agentgym.trainers.checkpoints.checkpoint import Checkpoint, copy_tokenizer, guard_writes
from agentgym.trainers.checkpoints.writer import Checkpoints
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.former_settings import with_current_names
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.tasks.mix import read_mix
from agentgym.types import JSON
from agentgym.yaml_text import parse_yaml

__all__ = ["RunFolder", "check_new_run", "free_run_folder", "read_settings", "recorded_run_date", "save_model"]

logger = logging.getLogger(__name__)

FREE = (
    *("server.", "executor", "ray.", "learner.fsdp.", "collapse.", "checkpoint.", "eval.", "record."),
    *("trackers", "tracking.", "speed.", "profile.", "limits.stall_s", "sampler.env_processes", "require_token"),
)
"""The prefixes of settings that may differ when a run is resumed: the location of its parts, its end, its checkpoints,
its evaluations, its record, its trackers, and access to its server."""

OF_PLAY = ("limits.", "sampling.", "sampler.", "local.")
"""The prefixes of settings that only the evaluations of a lesson depend on."""


class RunFolder:
    """Writes a run's files; all that was written before an error or a kill stays readable.

    `create` and `reopen` take `lock`: a write while another process writes raises RunFolderError.
    """

    def __init__(self, path: Path, checkpoint: CheckpointConfig) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints = Checkpoints(path, checkpoint)
        self.lock = FolderLock(path)
        self.heads: dict[str, JSON] = {}
        """The digests of config.yaml and of the record up to the newest step, by file."""

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> RunFolder:
        """Creates a new run; refuses a folder that already contains one."""
        check_new_run(path)
        if config.is_lesson and path.exists() and any(path.iterdir()):
            raise RunFolderError(f"{str(path)!r} is taken already: give another --output, or remove it")
        folder = cls(path, config.checkpoint)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.lock.take()
            replace_file(path / "config.yaml", settings_text(asdict(config)))
            record_environments(path, _environments_of(config))
        except OSError as error:
            raise RunFolderError(f"cannot write a run to {str(path)!r}: {error}; give another --output") from error
        try:
            folder.checkpoints.begin_copy(is_new=True)
        except RunFolderError:
            folder.abandon()
            raise
        return folder

    @classmethod
    def reopen(cls, path: Path, config: TrainConfig) -> tuple[RunFolder, Checkpoint | None]:
        """Opens a run and its newest checkpoint; refuses a configuration that differs in more than the run's length."""
        stored, current = (
            flatten_settings(_fill_defaults(read_settings(path), type(config))),
            flatten_settings(json.loads(json.dumps(asdict(config)))),
        )
        free = {"steps", "epochs", "max_minutes", "target_success"}
        names = [*current, *(name for name in stored if name not in current)]
        if stored.get("date") is None:  # no date was recorded: each process used its own
            free.add("date")
        changed = [name for name in names if name not in free and stored.get(name) != current.get(name)]
        prefixes = (*FREE, *OF_PLAY) if config.is_lesson else FREE
        changed = [name for name in changed if not name.startswith(prefixes)]
        if changed:
            diff = "; ".join(f"{name}: {stored.get(name)!r} there, {current.get(name)!r} here" for name in changed)
            raise RunFolderError(f"the run in {str(path)!r} has other settings ({diff}); resume with the same ones")
        folder = cls(path, config.checkpoint)
        folder.lock.take()
        record_environments(path, _environments_of(config))
        newest = folder.checkpoints.resume()
        folder._forget_after(newest.step if newest else 0)
        try:
            folder.checkpoints.begin_copy(is_new=False)
        except RunFolderError:
            folder.lock.release()
            raise
        return folder, newest

    def abandon(self) -> None:
        """Gives up a run that did not begin, so that its folder may be used again. Logs of servers stay."""
        self.lock.release()
        if not self.metrics_path.exists():
            for name in ("config.yaml", ENVIRONMENTS):
                (self.path / name).unlink(missing_ok=True)
            with suppress(OSError):  # there are logs in it
                self.path.rmdir()

    def close(self) -> None:
        """Waits until the checkpoints are written, and releases the lock for other processes."""
        try:
            self.checkpoints.close()
        finally:
            self.lock.release()

    @property
    def has_run(self) -> bool:
        """True if the folder contains a run."""
        return (self.path / "config.yaml").exists()

    def steps(self) -> list[dict[str, JSON]]:
        """Returns the recorded metrics of each step."""
        lines = self.metrics_path.read_text().splitlines() if self.metrics_path.exists() else []
        steps: list[dict[str, JSON]] = [json.loads(line) for line in lines]
        return [{name: value for name, value in step.items() if name != CHAIN} for step in steps]

    def write_metrics(self, metrics: StepMetrics, episodes: str) -> None:
        """Appends one step's line; `episodes` is the digest of the last line of the step's episodes."""
        with guard_writes(self.path), ChainedFile(self.metrics_path) as file:
            file.append([json.dumps(metrics.to_json(), separators=(",", ":"))])
            self.heads = self._heads(episodes, file.head)

    def finish_record(self, episodes: str) -> None:
        """Writes `digests.json` when the run ends; `episodes` is the digest of the last line of `episodes.jsonl`."""
        with guard_writes(self.path):
            heads = {"episodes.jsonl": episodes}
            if self.metrics_path.exists():
                with ChainedFile(self.metrics_path) as file:
                    heads["metrics.jsonl"] = file.head
            write_digests(self.path, heads, ("config.yaml", ENVIRONMENTS))
        self.checkpoints.finish_copy()

    def _heads(self, episodes: str, metrics: str) -> dict[str, JSON]:
        config = file_digest(self.path / "config.yaml")
        return {"config.yaml": config, "episodes.jsonl": episodes, "metrics.jsonl": metrics}

    def _forget_after(self, step: int) -> None:
        """Drops the metrics of steps after the newest checkpoint; those steps will be played again."""
        if not self.metrics_path.exists():
            return
        with guard_writes(self.path), ChainedFile(self.metrics_path) as file:
            num_bytes = 0
            for number, line in enumerate(self.metrics_path.read_bytes().splitlines(keepends=True), 1):
                if _step_of_line(line, number, self.metrics_path) > step:
                    discard_digests(self.path)
                    file.cut(num_bytes)
                    break
                num_bytes += len(line)


def _environments_of(config: TrainConfig) -> list[str]:
    """Returns the names of all environments that a run plays."""
    mixed = [entry.env for mix in (config.practice.mix, config.eval.mix) for entry in read_mix(mix).values()]
    return [name for name in (config.env, *mixed, *config.data.agents.values()) if name]


def _step_of_line(line: bytes, number: int, path: Path) -> int:
    try:
        return int(json.loads(line)["step"])
    except (*NOT_JSON, TypeError, KeyError) as error:
        raise RunFolderError(
            f"{str(path)!r}, line {number} is not a step ({error}): get the file back from a copy, or delete that line"
        ) from error


def save_model(model: LanguageModel, folder: Path, tokenizer: Path, renderer: Renderer) -> Path:
    """Writes the model with the tokenizer of the folder `tokenizer`, in the format of `transformers` and agentgym."""
    save_model_folder(model, folder)
    copy_tokenizer(tokenizer, folder, renderer)
    return folder


def check_new_run(path: Path) -> None:
    """Raises RunFolderError for a file, and for a folder that already contains a run."""
    if (path / "config.yaml").exists():
        raise RunFolderError(f"{str(path)!r} already holds a run; go on with --resume, or give another --output")
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"cannot write a run to {str(path)!r}, which is not a folder; give another --output")


def free_run_folder(config: TrainConfig) -> Path:
    """Returns a new path under `runs/`, named after the environment, the algo and the seed."""
    name = f"{stem_of(config.subject)}-{config.algo.rpartition(':')[2]}-seed{config.seed}"
    return next(path for n in range(1, 10_000) if not (path := Path("runs", f"{name}-{n}")).exists())


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads the configuration of the run in a folder; raises RunFolderError if there is none."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise RunFolderError(f"{str(folder)!r} holds no run: it has no config.yaml")
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{str(path)!r} cannot be read: {error}") from error
    if isinstance(settings, dict) and settings.get("kind") in ("sft", "dpo"):
        remedy = f"begin a new one with its weights, --model {folder}"
        raise RunFolderError(f"{str(folder)!r} is of an earlier version, and cannot be resumed: {remedy}")
    if not isinstance(settings, dict) or "algo" not in settings:
        raise RunFolderError(f"{str(folder)!r} holds no training run: its config.yaml is that of another command")
    return with_current_names(settings, _warn_once)


@cache
def _warn_once(line: str) -> None:
    logger.warning(line)


def recorded_run_date(folder: Path) -> str | None:
    """Returns the date that the chat template of a run writes, or None if it writes none."""
    date = read_settings(folder).get("date")
    return None if date is None else str(date)


def _fill_defaults(settings: dict[str, Any], kind: type[TrainConfig]) -> dict[str, Any]:
    """Returns a run's settings of this kind with defaults for those that did not exist when it began.

    If they contain settings that no longer exist, they are returned unchanged.
    """
    try:
        config = config_from_mapping(kind, settings)
    except ConfigError:
        return settings
    completed: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return completed
