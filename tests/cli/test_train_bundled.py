"""Every bundled environment trains with the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentgym.cli.main import main
from agentgym.envs.catalog.plugin import BUNDLED


@pytest.mark.slow
@pytest.mark.parametrize("env_id", BUNDLED)
def test_a_bundled_environment_trains_without_an_error(env_id: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["--algo", "grpo", "--steps", "1", "--tasks", "2", "--group-size", "2", "--eval.episodes", "0"]
    assert main(["train", "--env", env_id, *settings, "--output", str(run)]) == 0
    (step,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (step["step"], step["failed"]) == (1, 0)
    assert main(["verify", str(run)]) == 0
