"""Saves the episodes and the batch of a step that was halted, and loads the batch again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from agentgym.errors import RunFolderError
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.trainers.algorithms.aggregation import StepTotals
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.batch.credits import GroupCredit, credit_of_all
from agentgym.trajectory import Group, Trajectory, shortest_floats

__all__ = ["HaltedStep", "keep_episodes", "load_batch"]

BATCH = "batch.pt"


@dataclass(frozen=True, eq=False, kw_only=True)
class HaltedStep:
    """A step's episodes, their credit, and the batch made of them."""

    step: int
    """The number that the step would have had."""
    groups: Sequence[Group]
    credits: Sequence[GroupCredit]
    batch: TrainingBatch

    @classmethod
    def without_credit(cls, step: int, groups: Sequence[Group]) -> HaltedStep:
        """Returns a step that halted before its episodes were credited: none is trained, and the batch is empty."""
        nothing = credit_of_all(groups, (), ())
        return cls(
            step=step, groups=groups, credits=nothing, batch=build_batch(groups, nothing, aggregation="token-mean")
        )

    def save(self, run: Path) -> Path:
        """Writes `halted/step-NNNNNN` in the run's folder and returns it.

        `agentgym view` and `agentgym verify` read the folder as they read a run's; `load_batch` reads its `batch.pt`.
        """
        folder = _make_folder(run, self.step)
        try:
            tensors = {field.name: getattr(self.batch, field.name) for field in fields(self.batch)}
            torch.save({**tensors, "totals": asdict(self.batch.totals)}, folder / BATCH)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
            raise RunFolderError(f"cannot keep the halted step in {str(folder)!r}: {error}") from error
        with EpisodeWriter(folder) as writer:
            for group, credit in zip(self.groups, self.credits, strict=True):
                rows = (
                    None if member is None else [shortest_floats(row) for row in member] for member in credit.members
                )
                writer.write(group.trajectories, phase="train", step=self.step, advantages=rows)
        return folder


def keep_episodes(run: Path, step: int, played: Sequence[Trajectory]) -> Path:
    """Writes the episodes of a step that was not learned from, to the folder that `HaltedStep.save` uses."""
    folder = _make_folder(run, step)
    with EpisodeWriter(folder) as writer:
        writer.write(played, phase="train", step=step)
    return folder


def _make_folder(run: Path, step: int) -> Path:
    """Creates `halted/step-NNNNNN`, with only the run's settings in it."""
    folder = run / "halted" / f"step-{step:06d}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copyfile(run / "config.yaml", folder / "config.yaml")
    except OSError as error:
        raise RunFolderError(f"cannot keep the halted step in {str(folder)!r}: {error}") from error
    return folder


def load_batch(folder: Path) -> TrainingBatch:
    """Returns the batch in a halted step's folder, to retry `Learner.update`; raises RunFolderError without one."""
    try:
        stored = torch.load(folder / BATCH, weights_only=True)
    except OSError as error:
        raise RunFolderError(f"{str(folder)!r} holds no halted step ({error}); they are under RUN/halted") from error
    return TrainingBatch(**{**stored, "totals": StepTotals(**stored["totals"])})
