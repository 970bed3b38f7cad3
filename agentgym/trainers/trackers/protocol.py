"""What a tracker is: four methods, called one after the other on a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Protocol, TypeAlias

from agentgym.types import JSON

__all__ = ["Cell", "ShownEpisode", "TrackedRun", "Tracker"]

Cell: TypeAlias = "str | int | float | bool | None"


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that a tracker follows."""

    name: str
    """That of its folder."""
    project: str
    folder: Path
    """Where the run's files are: a tracker without a server writes there too."""
    config: Mapping[str, JSON]
    """Every setting, as in config.yaml."""
    step: int = 0
    """Steps that are behind it: above 0 where the run is resumed."""

    def recall(self, tracker: str) -> str | None:
        """What the tracker kept of this run before it was resumed: the name by which its library knows it."""
        path = self._path(tracker)
        return path.read_text().strip() if path.is_file() else None

    def keep(self, tracker: str, name: str) -> None:
        """Keeps the name by which the tracker's library knows this run."""
        path = self._path(tracker)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{name}\n")

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
    """What the model was shown first, as text of the chat format."""
    replies: str
    """What followed: its replies, and what answered them."""
    reward: float | None
    """None where the episode failed."""
    success: bool | None
    status: str
    stop_reason: str

    @classmethod
    def columns(cls) -> list[str]:
        """The names of the cells."""
        return [one.name for one in fields(cls)]

    @property
    def cells(self) -> list[Cell]:
        """The row, in the order of the columns."""
        return list(astuple(self))


class Tracker(Protocol):
    """Takes the numbers of a run as it goes; `begin` is called first and `finish` last, also where a run fails.

    What a method raises is warned of once, and ends the tracking; the run goes on.
    """

    def begin(self, run: TrackedRun) -> None:
        """The run begins, or goes on (`run.step` above 0)."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step, by their names in metrics.jsonl; those of an evaluation are `eval_success` and
        `eval_reward_mean`."""

    def episodes(self, step: int, sample: Sequence[ShownEpisode]) -> None:
        """Some episodes of a step."""

    def finish(self) -> None:
        """The run has ended; what is still to be written is."""
