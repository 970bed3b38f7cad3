"""The protocol of a tracker: four methods, called in sequence on its own thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Protocol, TypeAlias

from agentgym.rollout.record.manifest import replace_file
from agentgym.types import JSON

__all__ = ["Cell", "ShownEpisode", "TrackedRun", "Tracker"]

Cell: TypeAlias = "str | int | float | bool | None"


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that a tracker follows."""

    name: str
    """The name of the run's folder."""
    project: str
    folder: Path
    """The folder of the run's files, in which a tracker without a server writes too."""
    config: Mapping[str, JSON]
    """Every setting, as in config.yaml."""
    step: int = 0
    """The number of finished steps: above 0 if the run is resumed."""

    def recall(self, tracker: str) -> str | None:
        """Returns the name that `keep` stored before the run was resumed, or None."""
        path = self._path(tracker)
        return path.read_text().strip() if path.is_file() else None

    def keep(self, tracker: str, name: str) -> None:
        """Stores the name by which the tracker's library knows this run."""
        path = self._path(tracker)
        path.parent.mkdir(exist_ok=True)
        replace_file(path, f"{name}\n")

    def _path(self, tracker: str) -> Path:
        return self.folder / "trackers" / f"{tracker}.txt"


@dataclass(frozen=True, kw_only=True)
class ShownEpisode:
    """An episode as a row of a table."""

    step: int
    group: str
    member: int
    env: str
    prompt: str
    """The first prompt of the model, as text of the chat format."""
    replies: str
    """The text after the prompt: the model's replies, and the answers to them."""
    reward: float | None
    """The episode's reward; None if the episode failed."""
    success: bool | None
    status: str
    stop_reason: str

    @classmethod
    def columns(cls) -> list[str]:
        """Returns the names of the cells."""
        return [field.name for field in fields(cls)]

    @property
    def cells(self) -> list[Cell]:
        """The row, in the order of the columns."""
        return list(astuple(self))


class Tracker(Protocol):
    """Receives the numbers of a run as it goes; `begin` is called first and `finish` last, also if a run fails.

    An exception of a method is logged once as a warning and ends the tracking, after `finish`; the run goes on.
    """

    def begin(self, run: TrackedRun) -> None:
        """Starts tracking a run, or continues it (`run.step` above 0)."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the numbers of a step, by their names in metrics.jsonl.

        The numbers of an evaluation are `eval_success` and `eval_reward_mean`.
        """

    def episodes(self, step: int, sample: Sequence[ShownEpisode]) -> None:
        """Logs a sample of a step's episodes."""

    def finish(self) -> None:
        """Writes the remaining entries after the run's end."""
