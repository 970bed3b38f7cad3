"""What a training run shows on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from agentgym.cli.display.training import TrainingDisplay
from agentgym.trainers import Trainer
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.observer import Unobserved
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.trainers.settings.held_out import HeldOutConfig

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


def step_shown(
    monkeypatch: pytest.MonkeyPatch, steps: list[StepMetrics], stream: io.StringIO, config: TrainConfig
) -> list[str]:
    """Returns the lines that a run of these steps leaves on standard output."""
    monkeypatch.setattr("sys.stdout", stream)
    with TrainingDisplay(config, Path("runs/one")) as display:
        display.on_phase("train", 128)
        for step in steps:
            display.on_step(step)
    return CONTROL.sub("", stream.getvalue()).splitlines()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[StepMetrics]:
    """The metrics of a run's only step."""
    all_metrics: list[StepMetrics] = []

    class Keeper(Unobserved):
        def on_step(self, metrics: StepMetrics) -> None:
            all_metrics.append(metrics)

    config = TrainConfig(
        env="TextGame-v0",
        env_kwargs={"level": 1},
        steps=1,
        tasks=2,
        group_size=4,
        eval=HeldOutConfig(episodes=0),
    )
    Trainer(config, tmp_path_factory.mktemp("run") / "run", Keeper()).fit()
    return all_metrics


def test_a_terminal_of_80_columns_shows_the_main_numbers_of_a_step(
    steps: list[StepMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    config = TrainConfig(env="TextGame-v0", steps=40)
    lines = step_shown(monkeypatch, steps, Terminal(), config)
    header = next(line for line in lines if "success" in line)
    assert re.findall(r"[a-z/]+", header)[:7] == "step success reward loss left cut failed".split()
    row = lines[max(number for number, line in enumerate(lines) if "1/40" in line)]
    assert "\u2026" not in row and re.search(r"\d\.\d{3}.+\d\.\d{3}.+\d\.\d{4}.+\d:\d\d", row)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("columns", "last"), [("80", "grad"), ("40", "cut"), ("", "bubble")])
def test_a_pipe_gets_lines_of_the_width_of_columns_or_all_columns(
    columns: str, last: str, steps: list[StepMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    _, header, row = step_shown(monkeypatch, steps, io.StringIO(), TrainConfig(env="TextGame-v0", steps=40))
    assert header.endswith(last) and len(header) == len(row)


def test_the_time_left_ends_with_the_steps_or_the_minutes(
    steps: list[StepMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0])
    monkeypatch.setattr("agentgym.cli.display.training.time.monotonic", lambda: next(clock))
    config = TrainConfig(env="TextGame-v0", steps=40)
    assert step_shown(monkeypatch, steps, io.StringIO(), config)[2].split()[4] == "1h05m"
    clock = iter([0.0, 100.0])
    config = TrainConfig(env="TextGame-v0", steps=40, max_minutes=10)
    assert step_shown(monkeypatch, steps, io.StringIO(), config)[2].split()[4] == "8:20"
