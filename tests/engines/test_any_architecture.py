"""Models of transformers on real servers, before and after an update of their weights."""

from __future__ import annotations

import json

import pytest

from agentgym.cli.main import main

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("engine", "name"), [("sglang", "qwen3_moe"), ("vllm", "gemma3_text")])
def test_the_check_of_a_model_samples_on_a_server(
    engine: str, name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    python = request.getfixturevalue(f"{engine}_python")
    assert main(["models", "check", name, "--engine", engine, "--python", python, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report[engine]["passed"] and "after an update" in report[engine]["found"]
    assert ("experts replayed" in report[engine]["found"]) is (name == "qwen3_moe")


def test_experts_on_vllm_are_refused_by_name(vllm_python: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", "qwen3_moe", "--engine", "vllm", "--python", vllm_python, "--json"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "stores the experts of a mixture in a form of its own" in report["vllm"]["found"]
