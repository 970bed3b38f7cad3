"""Folders of OpenEnv, whose servers are started by the interpreter that has OpenEnv, and ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.cli.main import main
from agentgym.envs import make_env
from agentgym.envs.adapters import openenv_folder
from agentgym.envs.base.action import Action
from agentgym.errors import ConfigError
from agentgym.types import Message, ToolCall

GRID = Path(__file__).parent / "examples" / "openenv" / "grid_world_env"


@pytest.fixture(scope="module")
def echo(openenv_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `openenv init` writes."""
    folder = tmp_path_factory.mktemp("envs")
    command = [openenv_python, "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "echo_env"


def move(direction: str) -> Action:
    return Action.from_message(Message("assistant", "", tool_calls=(ToolCall("c", "act", {"action": direction}),)))


@pytest.mark.adapter
def test_an_environment_is_played_by_its_folder_and_its_server_is_shared(openenv_python: Path) -> None:
    name, keywords = f"openenv/{GRID}", {"python": str(openenv_python)}
    env, other = make_env(name, keywords), make_env(name, keywords)
    assert env.unwrapped.url == other.unwrapped.url  # type: ignore[attr-defined]
    other.close()
    observation, _ = env.reset(seed=1)
    assert json.loads(observation)["message"] == "Welcome to Grid World! Goal is at [4, 4]."
    assert env.step(move("SIDEWAYS"))[4]["tool_results"][0].error == "invalid_arguments"
    rewards = [env.step(move(direction)) for direction in ["DOWN"] * 4 + ["RIGHT"] * 4]
    assert [step[1] for step in rewards] == [pytest.approx(-0.1)] * 7 + [1.0]
    assert [step[2] for step in rewards] == [False] * 7 + [True]
    env.close()


@pytest.mark.adapter
@pytest.mark.parametrize("example", ["grid", "echo"])
def test_examples_are_evaluated_and_trained_on(openenv_python: Path, tmp_path: Path, echo: Path, example: str) -> None:
    folder = GRID if example == "grid" else echo
    env = ["--env", f"openenv/{folder}", "--env-kwargs", f"python={openenv_python}"]
    run = str(tmp_path / "run")
    short = ["--turn-tokens", "32", "--max-turns", "4", "--output", str(tmp_path / "eval")]
    assert main(["eval", *env, "--policy", "embedded", "-n", "2", *short]) == 0
    sizes = ["--tasks", "1", "--group-size", "2", "--eval.episodes", "0"]
    short = ["--limits.turn-tokens", "32", "--limits.max-turns", "4", "--output", run]
    assert main(["train", *env, "--steps", "2", *sizes, *short]) == 0
    steps = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert [step["failed"] for step in steps] == [0, 0]
    assert main(["verify", run]) == 0


@pytest.mark.adapter
def test_a_server_that_dies_is_started_for_the_next_environment(openenv_python: Path) -> None:
    name, keywords = f"openenv/{GRID}", {"python": str(openenv_python)}
    make_env(name, keywords).close()
    (process,) = (server for key, (server, _) in openenv_folder._servers.items() if key[2] == GRID.resolve())
    process.close()
    assert not process.is_alive
    env = make_env(name, keywords)
    assert env.reset(seed=0)[0]
    env.close()


@pytest.mark.adapter
def test_a_server_that_does_not_start_shows_its_last_lines(openenv_python: Path, tmp_path: Path) -> None:
    (tmp_path / "openenv.yaml").write_text("app: nothing:app\n")
    with pytest.raises(ConfigError, match=r'did not start: .*Could not import module "nothing"'):
        make_env(f"openenv/{tmp_path}", {"python": str(openenv_python)})


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (None, r"openenv\.yaml cannot be read"),
        ("a: [", r"openenv\.yaml cannot be read"),
        ("runtime: docker", "its runtime is 'docker'; 'fastapi' is started"),
        ("app: server.app", "its app is MODULE:NAME, got 'server.app'"),
        ("app: 3", "its app is MODULE:NAME, got 3"),
        ("type: space", r"has openenv \(none\); 0\.10\.x is read: python -m venv FOLDER"),
    ],
)
def test_a_folder_that_is_no_environment_is_refused(tmp_path: Path, manifest: str | None, reason: str) -> None:
    if manifest is not None:
        (tmp_path / "openenv.yaml").write_text(manifest)
    with pytest.raises(ConfigError, match=reason):
        make_env(f"openenv/{tmp_path}", {"python": sys.executable})


def test_an_interpreter_for_a_server_that_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        make_env("openenv/http://127.0.0.1:9", {"python": sys.executable})
