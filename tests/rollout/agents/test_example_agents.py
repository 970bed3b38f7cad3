"""The agents of examples/agents play a bundled environment by the command in their first lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUILD = Path(__file__).parent / "environments" / "build.sh"


def play(python: str, agent: str, folder: Path) -> tuple[int, list[str]]:
    """Plays eight episodes with the embedded model; returns how many failed, and the statuses."""
    words = ["eval", "--env", "TextGame-v0", "--agent", f"examples/agents/{agent}", "-n", "8", "--json"]
    done = subprocess.run(
        [python, "-m", "agentgym", *words, "--output", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    lines = (folder / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    return result["num_failed"], [json.loads(line)["status"] for line in lines]


def is_whole(played: tuple[int, list[str]]) -> bool:
    num_failed, statuses = played
    return num_failed == 0 and len(statuses) == 8 and "unplayed" not in statuses


@pytest.mark.long
@pytest.mark.parametrize("agent", ["openai_client.py:play", "mcp_agent.py:play"])
def test_an_agent_plays(agent: str, tmp_path: Path) -> None:
    assert is_whole(play(sys.executable, agent, tmp_path / "run"))


@pytest.mark.harness
@pytest.mark.parametrize(
    "agent", ["openai_agents_sdk.py:play", "openai_agents_sdk.py:play_chat", "langgraph_agent.py:play"]
)
def test_an_agent_of_an_sdk_plays(agent: str, tmp_path: Path) -> None:
    path = subprocess.run(
        [BUILD, "--path"], capture_output=True, text=True, check=True, env={**os.environ, "PYTHON": sys.executable}
    ).stdout.strip()
    assert is_whole(play(f"{path.split(':')[-1]}/python", agent, tmp_path / "run"))
