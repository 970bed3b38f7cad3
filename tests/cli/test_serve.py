"""`agentgym serve` and `agentgym train --serve`: agents that only speak chat completions play, and a model learns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.embedded import embedded_folder

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples" / "black_box_agent.py"
GAME = ["--env", "TextGame-v0", "--env-kwargs", "level=1"]
ENV = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Serving:
    """A command of ours that serves episodes, in a process of its own."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, "-W", "error", "-m", "agentgym", *map(str, args)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, **pipes, text=True, env=os.environ | ENV, cwd=ROOT)
        self.output: list[str] = []

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def url(self) -> str:
        return self.find(r"serving .* at (http://\S+)")

    def find(self, pattern: str) -> str:
        """Waits for a line that the pattern matches; its first group."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if match := re.search(pattern, line):
                return match[1]
        pytest.fail(f"it did not print {pattern!r}: {''.join(self.output)}")

    def finish(self) -> str:
        """Waits for its end; what it printed."""
        out, _ = self.process.communicate(timeout=120)
        self.output.append(out)
        return str(out)


def run_agent(url: str, parallel: int) -> str:
    command = [sys.executable, str(AGENT), "--url", url, "--parallel", str(parallel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | ENV, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_openai_client_plays_what_is_served_and_leaves_the_record_of_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, own = tmp_path / "run", tmp_path / "own"
    with Serving("serve", *GAME, "-n", 3, "-r", 2, "--port", 0, "--output", run, "--json") as serving:
        assert "played 6 episodes" in run_agent(serving.url(), parallel=4)
        result = json.loads(serving.finish().splitlines()[-1])
        assert serving.process.returncode == 0, serving.output
    assert result["num_episodes"] == 6 and result["num_failed"] == 0 and result["served"]
    assert main(["verify", str(run)]) == 0
    assert main(["view", str(run), "--share", str(run / "report.html")]) == 0
    assert main(["eval", *GAME, "-n", "3", "-r", "2", "--output", str(own)]) == 0
    assert (run / "episodes.jsonl").read_bytes() == (own / "episodes.jsonl").read_bytes()
    capsys.readouterr()


@pytest.mark.slow
def test_what_an_interrupt_left_is_served_on(tmp_path: Path) -> None:
    command = ("serve", *GAME, "-n", 2, "--port", 0, "--output", tmp_path / "run")
    with Serving(*command) as serving:
        serving.url()
        serving.process.send_signal(signal.SIGINT)
        serving.finish()
        assert serving.process.returncode == 130
        assert "--resume --output" in "".join(serving.output) and "Traceback" not in "".join(serving.output)
    with Serving(*command, "--resume", "--json") as serving:
        assert "played 2 episodes" in run_agent(serving.url(), parallel=2)
        assert json.loads(serving.finish().splitlines()[-1])["num_episodes"] == 2


@pytest.mark.slow
def test_a_model_is_trained_on_what_an_agent_outside_has_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "--steps 2 --tasks 3 --group-size 2 --eval.episodes 0 --practice.filter reward".split()
    with Serving("train", *GAME, *small, "--serve", 0, "--output", tmp_path / "run", "--json") as serving:
        played = run_agent(serving.url(), parallel=8)
        files = json.loads(serving.finish().splitlines()[-1])["files"]
        assert serving.process.returncode == 0, serving.output
    assert main(["verify", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    steps = [json.loads(line) for line in Path(files["metrics"]).read_text().splitlines()]
    assert len(steps) == 2 and all(step["loss"] is not None for step in steps)
    refilled = sum(step["refill_episodes"] for step in steps)
    assert refilled > 0 and f"played {12 + refilled} episodes" in played
    trained, shipped = (Path(folder, "model.safetensors") for folder in (files["checkpoint"], embedded_folder()))
    assert trained.read_bytes() != shipped.read_bytes()
    assert main(["train", *GAME, *small, "--output", str(tmp_path / "own")]) == 0
    own, outside = (tmp_path / name / "episodes.jsonl.zst" for name in ("own", "run"))
    assert own.read_bytes() == outside.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ("serve", *GAME, "--port", 0),
        pytest.param(("train", *GAME, "--eval.episodes", 0, "--serve", 0), marks=pytest.mark.slow),
    ],
)
def test_a_server_of_episodes_prints_the_token_that_it_requires(command: tuple[object, ...], tmp_path: Path) -> None:
    with Serving(*command, "--require-token", "--output", tmp_path / "run") as serving:
        request = urllib.request.Request(f"{serving.url()}/v1/models")
        token = serving.find(r"token: (\S+)")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=60)
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200


def test_a_token_without_a_server_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *GAME, "--require-token", "--output", str(tmp_path / "run")]) == 2
    assert "set serve to a port" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "oracle"], "--policy oracle plays by itself"),
        (["--policy", "http://127.0.0.1:1/v1"], "is a chat endpoint already"),
        (["--port", "70000"], "a port is a number from 0 to 65535"),
        (["--idle-s", "0"], "idle_s must be above 0"),
        (["--policy", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *GAME, *args]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.startswith("error: ") and "\n" not in error
    assert not list(tmp_path.iterdir())
