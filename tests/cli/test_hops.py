"""The number of functions between the command and the computation: a reader follows each of them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

import pytest

import agentgym
from agentgym.cli.main import main
from agentgym.trainers.algorithms.losses import clipped

PACKAGE = str(Path(agentgym.__file__).parent)
MAX_HOPS = 12


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def awaiting(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Yields the frames of a waiting task, from the outside in; a running one is on the stack of its thread.

    Python reads `cr_await` from the stack of the frame, which it may not do while another thread runs it.
    """
    coroutine: object = task.get_coro()
    while isinstance(coroutine, CoroutineType) and not coroutine.cr_running:
        if coroutine.cr_frame is not None:
            yield coroutine.cr_frame
        coroutine = coroutine.cr_await


def functions_of_the_package(frames: Iterator[FrameType]) -> list[str]:
    return [frame.f_code.co_qualname for frame in frames if frame.f_code.co_filename.startswith(PACKAGE)]


@pytest.mark.long
def test_few_functions_lie_between_the_command_and_the_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path: list[str] = []
    loss_stats = clipped.loss_stats

    def observed(*args: Any, **kwargs: Any) -> Any:
        worker = list(callers(sys._getframe(1)))
        ident = threading.main_thread().ident
        assert ident is not None
        command = list(callers(sys._current_frames()[ident]))
        loops = [frame.f_locals["self"] for frame in command if frame.f_code.co_name == "run_forever"]
        if loops and threading.current_thread() is not threading.main_thread():
            waiting = [frame for task in asyncio.all_tasks(loops[0]) for frame in awaiting(task)]
            frames = {id(frame): frame for frame in [*command[::-1], *waiting, *worker[::-1]]}
            path[:] = functions_of_the_package(iter(frames.values()))
        return loss_stats(*args, **kwargs)

    monkeypatch.setattr(clipped, "loss_stats", observed)  # the loss calls it
    sizes = "--env-kwargs level=1 --steps 1 --tasks 2 --group-size 4 --eval.episodes 0"
    assert main(["train", "--env", "TextGame-v0", *sizes.split(), "--output", str(tmp_path / "run")]) == 0
    assert {"main", "Trainer.fit", "Run.fit", "learn_step", "Learner.update", "ppo_clip"} <= set(path), path
    assert len(path) <= MAX_HOPS, path
