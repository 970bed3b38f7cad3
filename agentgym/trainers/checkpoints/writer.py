"""Writes the checkpoints of a run completely, on a thread, and deletes them once newer ones replace them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import cast

from agentgym.errors import AgentGymError, nearest
from agentgym.model.model_folder import is_read
from agentgym.rollout.record.manifest import replace_file, sync
from agentgym.trainers.checkpoints.checkpoint import (
    Checkpoint,
    Snapshot,
    checkpoint_folders,
    guard_writes,
    newest_whole,
    step_of,
)
from agentgym.trainers.checkpoints.run_copy import RECORDS, RunCopy
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.types import JSON

__all__ = ["Checkpoints", "best_step"]

logger = logging.getLogger(__name__)

BEST = "best"
WINDOW = 10
"""The least number of steps whose mean decides which checkpoint is best."""


class Checkpoints:
    """Writes the checkpoints of a run, one at a time, and deletes those that are not kept.

    A checkpoint is written next to its final name, `checkpoints/step-NNNNNN`, and renamed once all of it is on the
    disk: a folder with that name was complete. The next call raises an error of the thread as RunFolderError.
    """

    def __init__(self, run: Path, config: CheckpointConfig) -> None:
        self.run, self.config = run, config
        self.folder = run / "checkpoints"
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._has_read = threading.Event()
        self._has_read.set()
        self._newest: Path | None = None
        self._has_warned = False
        self._copy = RunCopy(run, config.copy_to) if config.copy_to else None

    def begin_copy(self, *, is_new: bool) -> None:
        """Sends what is there to `copy_to`; raises RunFolderError if that fails, or another run is there."""
        if self._copy is not None:
            self._copy.begin(is_new=is_new)

    def finish_copy(self) -> None:
        """Sends what was written since the last checkpoint to `copy_to`."""
        self.wait()
        if self._copy is not None:
            self._copy.send()

    def resume(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint, or None if there is none to resume from.

        What a kill left half-written is deleted. Torn checkpoints are renamed, so that their steps may be written
        again. Raises RunFolderError if there are checkpoints, but none of them is complete.
        """
        checkpoint = newest_whole(self.run)
        with guard_writes(self.run):
            for left in self.folder.glob(".*"):  # the run alone writes here
                left.unlink() if left.is_file() else shutil.rmtree(left, ignore_errors=True)
            if checkpoint is not None:
                for torn in checkpoint_folders(self.run):
                    if step_of(torn) > checkpoint.step:
                        _put_aside(torn)
                self._newest = checkpoint.path
        return checkpoint

    def save(self, snapshot: Snapshot, metrics: Sequence[Mapping[str, JSON]]) -> Path:
        """Starts to write the snapshot, after waiting for the previous one.

        `metrics` are the lines of `metrics.jsonl` up to the step, which decide the best checkpoint.
        """
        final = self.path_of(snapshot.step)
        self.wait()
        best = self._find_best([*map(step_of, checkpoint_folders(self.run)), snapshot.step], metrics)
        if snapshot.content.is_live:
            self._has_read.clear()
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing = self._thread.submit(self._write, snapshot, best)
        if not self.config.background:
            self.wait()
        self._newest = final
        return final

    @property
    def best_is_held_out(self) -> bool:
        """True if the best checkpoint is chosen by evaluations."""
        return self.config.best_is_held_out

    def name_best(self, metrics: Sequence[Mapping[str, JSON]]) -> None:
        """Names the best of the written checkpoints anew, after an evaluation that `metrics` end with."""
        self.wait()
        best = self._find_best([*map(step_of, checkpoint_folders(self.run))], metrics)
        if best is not None:
            with guard_writes(self.run):
                replace_file(self.folder / BEST, f"{self.path_of(best).name}\n")

    def path_of(self, step: int) -> Path:
        """Returns the path of a step's checkpoint."""
        return self.folder / f"step-{step:06d}"

    def holds(self, step: int) -> bool:
        """True if the newest checkpoint, even if it is still being written, is that of the step."""
        return self._newest == self.path_of(step)

    def check(self) -> None:
        """Raises the error of a checkpoint that could not be written, without waiting."""
        if self._writing is not None and self._writing.done():
            self.wait()

    async def before_update(self) -> None:
        """Waits until the checkpoint that is being written has no need of the tensors as they are now."""
        if not self._has_read.is_set():
            await asyncio.to_thread(self._has_read.wait)

    async def ready(self) -> None:
        """Waits, without blocking the event loop, until nothing is being written."""
        if self._writing is not None:
            await asyncio.to_thread(wait, [self._writing])
        self.check()

    def wait(self) -> None:
        """Waits until nothing is being written; raises an error of the write once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except BaseException:
                self._newest = None
                raise

    def close(self) -> None:
        """Waits until nothing is being written, and ends the thread; an error that was not raised yet is logged."""
        try:
            self.wait()
        except AgentGymError as error:
            logger.error("the last checkpoint was not written: %s", error)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _write(self, snapshot: Snapshot, best: int | None) -> None:
        final = self.path_of(snapshot.step)
        part = final.with_name(f".{final.name}.part")
        with guard_writes(self.run):
            try:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                snapshot.write(part)
            finally:
                self._has_read.set()
            for name in RECORDS:
                sync(self.run / name)  # a run cannot resume from a checkpoint whose steps are not recorded
            os.replace(part, final)
            sync(self.folder)
            if best is not None:
                replace_file(self.folder / BEST, f"{self.path_of(best).name}\n")
            self._delete_old(best)
        if self._copy is not None:
            self._copy.send()

    def _find_best(self, steps: Sequence[int], metrics: Sequence[Mapping[str, JSON]]) -> int | None:
        name = self.config.keep_best
        if name is None:
            return None
        best = best_step(steps, metrics, name, max(WINDOW, self.config.every))
        lines = [line for line in metrics if "eval_success" in line] if self.best_is_held_out else metrics
        lacks = not any(name in line for line in lines) if self.best_is_held_out else best is None
        if lines and lacks and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "no step has a number %r to find the best checkpoint by%s (checkpoint.keep_best; metrics.jsonl has"
                " their names)",
                *(name, nearest(name, lines[-1]).removesuffix(".")),
            )
        return best

    def _delete_old(self, best: int | None) -> None:
        if not self.config.keep:
            return
        for folder in checkpoint_folders(self.run)[: -self.config.keep]:
            if step_of(folder) == best or is_read(folder):
                continue
            gone = folder.with_name(f".{folder.name}.gone")
            os.replace(folder, gone)  # so that no half of it is ever found under its name
            shutil.rmtree(gone)


def best_step(steps: Sequence[int], metrics: Sequence[Mapping[str, JSON]], name: str, window: int) -> int | None:
    """Returns the step with the greatest mean of the metric `name` over the `window` steps up to it.

    Of equal ones it is the later; None if no step has the metric. Example: success of 0, 1, 1, 0 in steps 1 to 4 and a
    window of 2 make 3 the best of steps 2, 3 and 4. A number of the held-out tasks is that of the step before the line
    that has it, alone.
    """
    means: dict[int, float] = {}
    is_held_out = name.startswith("eval_")
    for step in steps:
        first, last = (step + 1, step + 1) if is_held_out else (step - window + 1, step)
        lines = [line for line in metrics if first <= cast(int, line["step"]) <= last]
        values = [value for line in lines if isinstance(value := line.get(name), int | float) and isfinite(value)]
        if values:
            means[step] = sum(values) / len(values)
    return max(means, key=lambda step: (means[step], step), default=None)


def _put_aside(torn: Path) -> None:
    """Renames a torn checkpoint, which is kept for inspection."""
    aside = torn.with_name(f"torn-{torn.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(torn, aside)
    with suppress(FileNotFoundError):
        best = torn.with_name(BEST)
        if best.read_text().strip() == torn.name:
            best.unlink()
