"""A server with state in an environment that is trained: sixteen episodes side by side, each with its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trajectory import Status, Trajectory

TALLY = f"{Path(__file__).parent / 'tally.py'}:Tally"


def steps(trajectory: Trajectory) -> list[str]:
    """The numbers of the steps, as the server counted them."""
    results = [result for turn in trajectory.turns for result in turn.tool_results]
    return [result.content.split("Step ")[1] for result in results if result.name == "go" and result.error is None]


@pytest.mark.slow
def test_an_environment_with_a_server_of_its_own_is_trained(
    tmp_path: Path,
    small_run: Any,
    train: Callable[..., Any],
    server_processes: Callable[[], list[psutil.Process]],
) -> None:
    over = threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not over.wait(0.2):
            seen.append(len(server_processes()))

    watching = threading.Thread(target=watch)
    watching.start()
    train(replace(small_run, env=TALLY, env_kwargs={}, tasks=2, group_size=8, steps=2), tmp_path / "run")
    over.set()
    watching.join()
    played = [record.trajectory for record in read_episodes(tmp_path / "run")]
    assert len(played) == 32 and {trajectory.status for trajectory in played} <= {Status.COMPLETED, Status.TRUNCATED}
    walks = [steps(trajectory) for trajectory in played]
    assert sum(len(walk) > 1 for walk in walks) > 8  # with one server for all, no two of them would begin at step 1
    assert walks == [[f"{number}." for number in range(1, len(walk) + 1)] for walk in walks]
    assert max(seen) >= 8  # side by side
    ends = time.monotonic() + 30
    while server_processes():
        assert time.monotonic() < ends
        time.sleep(0.1)
