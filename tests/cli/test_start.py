"""The first moments of a command: Ctrl-C while its libraries load, and the token that a server prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentgym.http_guard import shown_token

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-the-user-0123456789"
SERVERS = {
    "serve": "serve --env GuessNumber-v0 --port 0 --output run",
    "env serve": "env serve GuessNumber-v0 --port 0",
    "reward-server": "reward-server --reward.function exact_match --port 0",
    "fake-server": "fake-server --port 0",
    "sandbox serve": "sandbox serve --port 0",
    "train": "train --env GuessNumber-v0 --serve 0 --eval.episodes 0 --output run",
}


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.2])
def test_ctrl_c_at_the_start_is_one_line(tmp_path: Path, delay_s: float) -> None:
    code = "import sys; sys.argv[0] = 'bin/agentgym'; import agentgym.cli; print(1, flush=True)\n"
    code += "from agentgym.cli.main import run; run()"
    words = ["eval", "--env", "TextGame-v0", "--policy", "random", "-n", "5000", "--output", str(tmp_path / "run")]
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.readline()  # Python itself has started
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and errors.startswith("error: interrupted") and errors.count("\n") == 1, errors


def test_a_token_of_the_environment_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTGYM_TOKEN", f" {TOKEN} ")
    assert shown_token(TOKEN) == "$AGENTGYM_TOKEN" and shown_token("another") == "another"
    monkeypatch.delenv("AGENTGYM_TOKEN")
    assert shown_token(TOKEN) == TOKEN


def test_every_command_that_has_a_token_shows_it_in_this_way() -> None:
    files = [path for path in (ROOT / "agentgym").rglob("*.py") if "choose_token(" in path.read_text()]
    printing = [path for path in files if path.name != "http_guard.py" and re.search(r"\btoken: \{", path.read_text())]
    assert len(printing) == len(SERVERS)
    assert not [path for path in printing if re.search(r"\{(\w+\.)*token\}", path.read_text())]


@pytest.mark.long
@pytest.mark.parametrize("name", SERVERS)
def test_a_server_does_not_print_the_token_of_the_environment(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "agentgym", *SERVERS[name].split()]
    environment = os.environ | {"AGENTGYM_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as process:  # type: ignore[call-overload]
        lines = [next(line for line in process.stdout if "token: " in line)]
        process.send_signal(signal.SIGINT)
        lines += process.communicate(timeout=120)[0].splitlines()
    assert "token: $AGENTGYM_TOKEN " in lines[0] and TOKEN not in "".join(lines)
