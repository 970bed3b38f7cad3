"""`agentgym models`: the list of architectures, and the check of a model folder or an architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentgym.cli.main import main
from agentgym.trainers.model_check.small_models import ARCHITECTURES, save_small_model


def _report(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    report: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)
    return report


def test_the_list_names_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--json"]) == 0
    assert list(_report(capsys)["models"]) == list(ARCHITECTURES)


def test_the_list_has_a_line_for_each_architecture_and_each_reason_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    table, reasons = lines[: len(ARCHITECTURES) + 2], lines[len(ARCHITECTURES) + 2 : -1]
    assert max(len(line) for line in table[2:] if line.endswith("-")) <= 80
    rows = {words[0]: line for line in table[2:] if (words := line.split())}
    assert rows["phi"].split()[1:3] == ["-", "-"] and rows["phi"].endswith("loads")
    assert [reason for reason in reasons if reason.startswith("phi, loads: a model without a linear output head")]


@pytest.mark.long
def test_a_folder_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small_model("gemma3_text", tmp_path)
    capsys.readouterr()
    assert main(["models", "check", str(tmp_path), "--json"]) == 0
    report = _report(capsys)
    assert report["loads"].items() >= {"passed": True, "found": "transformers"}.items()
    assert report["template"] is None and "gemma3_text" in str(report["refusal"])


@pytest.mark.long
def test_a_config_alone_is_checked_as_a_small_model_and_exits_with_1_on_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_small_model("jamba", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    capsys.readouterr()
    assert main(["models", "check", str(tmp_path), "--json"]) == 1
    report = _report(capsys)
    assert report["samples"]["passed"]
    assert not report["adapters"]["passed"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("qwen4", "did you mean 'qwen3'"), ("missing/", "no model folder"), ("kimi_k2", "cannot make a small model")],
)
def test_what_cannot_be_checked_is_said_in_a_line(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", name]) == 2
    assert message in capsys.readouterr().err
