"""What a training run shows on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from agentgym.cli.training_display import TrainingDisplay
from agentgym.trainers.config import TrainConfig

CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_address_and_the_token_of_a_server_stay_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stdout", terminal)
    with TrainingDisplay(TrainConfig(env="TextGame-v0"), Path("runs/one")) as display:
        display.on_phase("serving the episodes of training at http://127.0.0.1:8000", 0)
        display.on_phase("token: a-token-of-the-server", 0)
        display.on_phase("train", 128)
    lines = CONTROL.sub("", terminal.getvalue()).splitlines()
    assert "token: a-token-of-the-server" in lines
    assert "serving the episodes of training at http://127.0.0.1:8000" in lines
