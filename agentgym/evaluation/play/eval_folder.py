"""The folder of an evaluation: its settings, its episodes as they finish, and those that a resume need not replay."""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from agentgym.errors import ConfigError, RunFolderError
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.record import tools_file as tool_menus
from agentgym.rollout.record.environments_file import ENVIRONMENTS
from agentgym.rollout.record.episodes_file import EpisodeWriter, read_episodes
from agentgym.rollout.record.folder_digests import DIGESTS, discard_digests, write_digests
from agentgym.rollout.record.folder_lock import LOCK_NAME, FolderLock
from agentgym.rollout.record.json_pieces import PIECE
from agentgym.rollout.record.line_reader import FILE_NAME
from agentgym.rollout.record.manifest import replace_file
from agentgym.rollout.record.settings_file import settings_text
from agentgym.trajectory import Trajectory
from agentgym.types import JSON
from agentgym.yaml_text import parse_yaml

__all__ = ["EvalFolder", "free_folder", "recorded_eval_date"]

CONFIG = "config.yaml"
RESULT = "result.json"
Key = tuple[str, int]
"""The group and member of an episode."""


class EvalFolder:
    """Opens `path` for the evaluation with these settings; `kept` holds the good episodes that it has already.

    Episodes are appended as they finish, in any order, so that a kill loses none; `finish` sorts them.
    Raises RunFolderError if the folder holds something and `resume` is false, is no evaluation's, is written by another
    process, or cannot be written; raises ConfigError, naming the settings, if it belongs to another evaluation.
    """

    def __init__(self, path: Path, settings: Mapping[str, JSON], *, resume: bool) -> None:
        self.path = path
        self.kept: dict[Key, Trajectory] = {}
        self.num_written = 0
        """The number of episodes appended since the folder was opened."""
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{str(path)!r} is a file; --output takes a folder")
        self._lock = FolderLock(path)
        if path.is_dir() and not _is_blank(path):
            self._reopen(settings, resume)
        else:
            with name_write_errors(path):
                path.mkdir(parents=True, exist_ok=True)
                self._lock.take()
                replace_file(path / CONFIG, settings_text(settings))
        discard_digests(path)
        self._writer = EpisodeWriter(path)
        self._thread = ThreadPoolExecutor(1, "agentgym-record")
        self._writes: deque[Future[None]] = deque()

    def _reopen(self, settings: Mapping[str, JSON], resume: bool) -> None:
        if not (self.path / CONFIG).is_file():
            raise RunFolderError(f"{str(self.path)!r} holds files, and no {CONFIG}: name a new folder with --output")
        if not resume:
            raise RunFolderError(
                f"{str(self.path)!r} holds a run already: go on with it by --resume, or name a new folder with --output"
            )
        self._lock.take()
        stored = _read_yaml(self.path / CONFIG)
        new_settings = _plain(settings)
        names = [name for name in {**new_settings, **stored} if stored.get(name) != new_settings.get(name)]
        if names:
            what = ", ".join(f"{name} was {stored.get(name)!r} and is now {new_settings.get(name)!r}" for name in names)
            raise ConfigError(f"cannot resume {str(self.path)!r}: {what}; repeat its settings, or name a new --output")
        if (self.path / FILE_NAME).is_file():
            played = [record.trajectory for record in read_episodes(self.path)]
            self.kept = {
                (trajectory.group, trajectory.member): trajectory
                for trajectory in played
                if trajectory.status.trainable
            }

    def write(self, trajectory: Trajectory) -> None:
        """Appends one finished episode; one of many tokens, and those that finish meanwhile, in another thread.

        An error of that thread is raised by the next call, or by `finish`.
        """
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()
        if self._writes or trajectory.num_tokens > PIECE:
            self._writes.append(self._thread.submit(self._writer.write, [trajectory], phase="eval"))
        else:
            self._writer.write([trajectory], phase="eval")
        self.num_written += 1

    def finish(self, trajectories: Sequence[Trajectory], result: Mapping[str, JSON]) -> None:
        """Sorts the episodes in the order of `trajectories`, which makes the file a function of the settings alone."""
        while self._writes:
            self._writes.popleft().result()
        self._writer.close()
        aside = self.path / ".in-order"
        with name_write_errors(self.path):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            with EpisodeWriter(aside) as ordered:
                ordered.write(trajectories, phase="eval")
                head = ordered.head
            for file in aside.iterdir():
                os.replace(file, self.path / file.name)
            aside.rmdir()
            replace_file(self.path / RESULT, json.dumps(_plain(result), indent=2) + "\n")
            write_digests(self.path, {FILE_NAME: head}, (CONFIG, RESULT))

    def close(self) -> None:
        """Writes what is left, closes the file and lets other processes write; a second call does nothing.

        Raises RunFolderError if the disk did not take an episode.
        """
        self._thread.shutdown()
        self._writer.close()
        self._lock.release()
        writes = list(self._writes)
        self._writes.clear()
        for write in writes:
            write.result()


def missing(episodes: Sequence[Episode], stored: Mapping[Key, Trajectory]) -> list[Episode]:
    """Returns the episodes that have to be played."""
    return [episode for episode in episodes if (episode.group, episode.member) not in stored]


def recorded_eval_date(path: Path) -> str | None:
    """Returns the date that the chat template of a folder's evaluation writes.

    None if it writes none, or if the folder holds no evaluation.
    """
    date = _read_yaml(path / CONFIG).get("date") if (path / CONFIG).is_file() else None
    return None if date is None else str(date)


def free_folder(path: Path) -> Path:
    """Returns `path`, or the first of `path-2`, `path-3`, ... that does not exist."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


@contextmanager
def name_write_errors(path: Path) -> Iterator[None]:
    """Names the folder in errors of the file system."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(f"cannot write in the run folder {str(path)!r}: {error.strerror or error}") from error


def _is_blank(path: Path) -> bool:
    """Returns True if the folder is empty, or as left by an evaluation that ended before its first episode."""
    names = {entry.name for entry in path.iterdir()} - {tool_menus.FILE_NAME, LOCK_NAME, DIGESTS, ENVIRONMENTS}
    return not names or (names == {CONFIG, FILE_NAME} and (path / FILE_NAME).stat().st_size == 0)


def _read_yaml(path: Path) -> dict[str, JSON]:
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{str(path)!r} holds no settings")
    return value


def _plain(settings: Mapping[str, JSON]) -> dict[str, JSON]:
    """Returns the settings after a round trip through JSON: tuples become lists, and only plain types are left."""
    plain: dict[str, JSON] = json.loads(json.dumps(settings, default=dict))
    return plain
