"""A run's folder has one writing process, and never one that is dead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentgym.errors import RunFolderError
from agentgym.evaluation import evaluate
from agentgym.evaluation.play.config import EvalConfig
from agentgym.rollout.record.folder_lock import LOCK_NAME, FolderLock
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.settings.held_out import HeldOutConfig

HOLD = """
import os
import sys
from pathlib import Path
from agentgym.rollout.record.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.take()
print("taken", flush=True)
sys.stdin.read()
"""

FORK = HOLD.replace("print(", "os.fork() and os.waitpid(-1, 0)\nprint(") + "lock.release()\nprint('the fork ends')\n"


@contextmanager
def another_process(folder: Path, source: str = HOLD) -> Iterator[subprocess.Popen[str]]:
    """A process that has the folder's lock until it ends."""
    command = [sys.executable, "-c", source, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "taken\n"
            yield process
        finally:
            process.kill()


def contents(folder: Path) -> dict[Path, bytes]:
    """Its files but for the lock, which a process that is killed leaves behind."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK_NAME}


def test_another_process_is_named_and_kept_out_until_it_dies(tmp_path: Path) -> None:
    mine = FolderLock(tmp_path)
    with another_process(tmp_path) as process:
        with pytest.raises(RunFolderError, match=f"process {process.pid} on {socket.gethostname()} writes in"):
            mine.take()
        process.kill()
        process.wait()
        mine.take()
    mine.take()
    mine.release()
    mine.release()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_released_leaves_the_folder_to_others(tmp_path: Path) -> None:
    mine = FolderLock(tmp_path)
    mine.take()
    mine.release()
    with another_process(tmp_path), pytest.raises(RunFolderError, match="writes in"):
        mine.take()


def test_a_forked_process_neither_has_the_lock_nor_releases_it(tmp_path: Path) -> None:
    with another_process(tmp_path, FORK) as process:
        with pytest.raises(RunFolderError, match=f"process {process.pid} on"):
            FolderLock(tmp_path).take()
        process.kill()
        process.wait()
        mine = FolderLock(tmp_path)
        mine.take()
        assert process.stdout is not None and process.stdin is not None
        process.stdin.close()
        assert process.stdout.read() == "the fork ends\n"
        assert (tmp_path / LOCK_NAME).read_text().startswith(f"process {os.getpid()} ")
    mine.release()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="absent"):
        FolderLock(tmp_path / "absent").take()


@pytest.mark.long
def test_a_run_that_is_going_on_elsewhere_is_not_resumed_and_loses_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(
        TrainConfig(env="GuessNumber-v0", steps=1, tasks=1, group_size=2, eval=HeldOutConfig(episodes=0)), run
    ).fit()
    assert not (run / LOCK_NAME).exists()
    before = contents(run)
    with another_process(run), pytest.raises(RunFolderError, match="writes in"):
        Trainer.load(run, steps=2)
    assert contents(run) == before
    assert Trainer.load(run, steps=2).fit().steps == 2


def test_an_evaluation_that_is_going_on_elsewhere_is_not_resumed(tmp_path: Path) -> None:
    run = tmp_path / "eval"
    config = EvalConfig(env="GuessNumber-v0", policy="oracle", num_tasks=2)
    evaluate(config, output=run)
    assert not (run / LOCK_NAME).exists()
    with another_process(run), pytest.raises(RunFolderError, match="writes in"):
        evaluate(config, output=run, resume=True)
    assert evaluate(config, output=run, resume=True).summary.num_episodes == 2


LINKED = [LOCK_NAME, "config.yaml", "metrics.jsonl", "episodes.jsonl", "checkpoints", "mlflow/mlflow.db"]


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_with_a_link_in_it_is_not_written(name: str, tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(victim)
    with pytest.raises(RunFolderError, match=f"{name}' is a link, and nothing is written through links"):
        FolderLock(run).take()
    assert victim.read_text() == "precious"


def test_links_of_a_tracker_and_a_folder_that_is_one_are_no_obstacle(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "wandb").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to(run)
    (tmp_path / "elsewhere").symlink_to(run)
    lock = FolderLock(tmp_path / "elsewhere")
    lock.take()
    assert (run / LOCK_NAME).exists()
    lock.release()
    assert not (run / LOCK_NAME).exists()


def test_a_process_that_ends_takes_its_lock_away(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        assert not list(tmp_path.iterdir())
