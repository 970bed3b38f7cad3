"""Runs commands in this process, and keeps what they printed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main

FLAKY = '''
import time

from agentgym.envs import TextEnv


class Flaky(TextEnv):
    """Raises for every third seed."""

    max_turns = 3
    runs_inline = True

    def reset(self, *, seed=None, options=None):
        self.broken = seed % 3 == 0
        return "Say something.", {}

    def step(self, action):
        if self.broken:
            raise ValueError("the machine fell apart")
        return "Done.", 1.0, True, False, {}


class Broken(Flaky):
    """Raises always."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0)


class Slow(Flaky):
    """Takes its time."""

    runs_inline = False

    def step(self, action):
        time.sleep(0.1)
        return "Done.", 1.0, True, False, {}
'''


@dataclass(frozen=True)
class Finished:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.out + self.err

    @property
    def json(self) -> dict[str, Any]:
        """The whole of standard output: with `--json` it is one object, and nothing else."""
        assert self.out.count("\n") == 1
        value: dict[str, Any] = json.loads(self.out)
        return value


Command = Callable[..., Finished]


@pytest.fixture
def agentgym(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokenizer_folder: Path
) -> Command:
    """`agentgym("play", "TextGame-v0", typed="quit\\n")`; `eval` gets the tests' tokenizer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flaky.py").write_text(FLAKY, encoding="utf-8")

    def run(*args: object, typed: str = "") -> Finished:
        words = [str(arg) for arg in args]
        if words[:1] == ["eval"] and "--tokenizer" not in words:
            words += ["--tokenizer", str(tokenizer_folder)]
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as stop:  # `--help` of a command
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return Finished(code, printed.out, printed.err)

    return run
