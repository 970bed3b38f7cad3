"""Fixtures that run learners on several ranks: `rank_process.py`, started once for a module's tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parent / "rank_process.py"


def numbers_of(stats: Any) -> dict[str, float]:
    """Returns the numbers of `StepStats` by name; the load of each router's expert as `load-LAYER-EXPERT`."""
    numbers = asdict(stats)
    router = numbers.pop("router", None) or {}
    for layer, loads in enumerate(router.pop("router_loads", ())):
        router |= {f"load-{layer}-{expert}": load for expert, load in enumerate(loads)}
    return {name: value for name, value in (numbers | router).items() if value is not None}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """`on_ranks(cases, size)` trains by each case on `size` new ranks, and returns each rank's results by case."""
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:

        def run_cases(cases: dict[str, Any], size: int) -> list[dict[str, Any]]:
            assert program.stdin and program.stdout
            folder = tmp_path_factory.mktemp("ranks")
            torch.save(cases, folder / "cases.pt")
            print(size, folder, file=program.stdin, flush=True)
            assert json.loads(program.stdout.readline()) == [0] * size
            return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(size)]

        try:
            yield run_cases
        finally:
            os.killpg(program.pid, signal.SIGKILL)  # its process group has the ranks, which may still train
