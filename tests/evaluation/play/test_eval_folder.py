"""The folder of an evaluation has each episode, also those that a thread writes."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentgym.errors import RunFolderError
from agentgym.evaluation.play.eval_folder import EvalFolder
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.rollout.record.json_pieces import PIECE
from agentgym.rollout.record.line_reader import FILE_NAME
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task


def episode(num_tokens: int, index: int) -> Trajectory:
    reply = TokenSpan((5,) * num_tokens, Source.POLICY, (-0.5,) * num_tokens, (0,) * num_tokens)
    row = Row((TokenSpan((1, 2), Source.PROMPT), reply))
    turn = Turn(Message("assistant", "a"), 0.5)
    return Trajectory(Task("X-v0", 1), f"0/{index}", 0, (row,), (turn,), Status.COMPLETED, StopReason.TERMINATED)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_long_and_short_episodes_are_there_after_a_close_and_are_not_played_again(tmp_path: Path) -> None:
    folder = EvalFolder(tmp_path / "run", {}, resume=False)
    episodes = [episode(size, index) for index, size in enumerate((3, 4 * PIECE, 3, 4 * PIECE, 3))]
    for each in episodes:
        folder.write(each)
    folder.close()
    assert [record.trajectory for record in read_episodes(folder.path)] == episodes
    again = EvalFolder(folder.path, {}, resume=True)
    assert list(again.kept.values()) == episodes
    again.close()


@pytest.mark.parametrize("is_finished", [False, True])
def test_an_episode_that_the_disk_does_not_take_is_an_error_of_the_end(tmp_path: Path, is_finished: bool) -> None:
    folder = EvalFolder(tmp_path / "run", {}, resume=False)
    folder.write(episode(3, 0))
    whole = (folder.path / FILE_NAME).stat().st_size
    with files_up_to(whole + 50):
        folder.write(episode(4 * PIECE, 1))
        with pytest.raises(RunFolderError, match=str(folder.path)):
            folder.finish([], {}) if is_finished else folder.close()
    folder.close()
    assert [record.trajectory.group for record in read_episodes(folder.path)] == ["0/0"]
