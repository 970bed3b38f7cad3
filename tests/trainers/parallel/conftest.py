"""The program of the ranks, started once for all the cases of a module."""

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
    """The numbers of statistics by name, those of the routers among them."""
    numbers = asdict(stats)
    router = numbers.pop("router", None) or {}
    for layer, loads in enumerate(router.pop("router_loads", ())):
        router |= {f"load-{layer}-{expert}": load for expert, load in enumerate(loads)}
    return {name: value for name, value in (numbers | router).items() if value is not None}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """`on_ranks(cases, size)` learns the cases on new ranks, and returns what each of them found."""
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:

        def learn(cases: dict[str, Any], size: int) -> list[dict[str, Any]]:
            assert program.stdin and program.stdout
            folder = tmp_path_factory.mktemp("ranks")
            torch.save(cases, folder / "cases.pt")
            print(size, folder, file=program.stdin, flush=True)
            assert json.loads(program.stdout.readline()) == [0] * size
            return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(size)]

        try:
            yield learn
        finally:
            os.killpg(program.pid, signal.SIGKILL)  # and ranks that still learn
