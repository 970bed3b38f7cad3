"""A mixture of experts on real servers, before and after an update of their weights."""

from __future__ import annotations

import json

import pytest

from agentgym.cli.main import main

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_check_of_a_model_samples_on_a_server(
    engine: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    python = request.getfixturevalue(f"{engine}_python")
    assert main(["models", "check", "qwen3_moe", "--engine", engine, "--python", python, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found[engine]["passed"] and "after an update" in found[engine]["found"]
    assert ("experts replayed" in found[engine]["found"]) is (engine == "sglang")
    assert found["replay"]["passed"]
