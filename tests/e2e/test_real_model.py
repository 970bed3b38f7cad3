"""`python benchmarks/real_model.py` runs the package's commands, each once; here with small random models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import real_model
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentgym.embedded import embedded_folder

SHAPE: dict[str, Any] = {
    "vocab_size": 1984,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
}


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[[str], str]:
    """Saves a random model of a kind by transformers, with the tokenizer of the embedded model."""

    def make(kind: str) -> str:
        folder = tmp_path / kind
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE)).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(embedded_folder() / name, folder / name)
        return str(folder)

    return make


def test_no_sum_is_in_two_files(tmp_path: Path) -> None:
    real_model.write_sums(tmp_path, seed=3)
    questions = []
    for name, count in real_model.SUMS_OF_FILE.items():
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        questions += [row["messages"][0]["content"] if name == "lessons" else row["prompt"] for row in rows]
    assert len(set(questions)) == 40 * 40


def test_a_finished_phase_is_recorded_and_not_run_again(make_model: Callable[[str], str], tmp_path: Path) -> None:
    output = tmp_path / "real"
    words = ["--model", make_model("llama"), "--steps", "2", "--episodes", "4", "--output", str(output)]
    phases = ["--phases", "before", "lessons"]
    assert real_model.main([*words, *phases]) == 0
    report = (output / "results.json").read_text()
    before, lessons = (json.loads(report)["phases"][name] for name in ("before", "lessons"))
    assert before["num_episodes"] == 4 and len(before["success_interval"]) == 2
    assert [step["step"] for step in lessons["curve"]] == [1, 2] and lessons["curve"][0]["loss"] > 0
    assert all(phase["cpu_s"] > 0 and phase["peak_mb"] > 50 for phase in (before, lessons))
    assert real_model.main([*words, *phases]) == 0
    assert (output / "results.json").read_text() == report
    with pytest.raises(SystemExit, match="was run by another command"):
        real_model.main([*words, "--phases", "lessons", "--lesson-steps", "1"])


@pytest.mark.slow
def test_all_phases_end_with_an_export_that_transformers_computes(
    make_model: Callable[[str], str], tmp_path: Path
) -> None:
    words = ["--model", make_model("gemma3_text"), "--steps", "2", "--episodes", "4", "--no-trl"]
    words += ["--task", "orders", "--output", str(tmp_path / "real")]
    with pytest.raises(SystemExit, match="before did not end"):
        real_model.main([*words, "--minutes", "0"])
    assert real_model.main(words) == 0
    phases = json.loads((tmp_path / "real" / "results.json").read_text())["phases"]
    assert list(phases) == [phase.name for phase in real_model.list_phases(real_model.parse(words))]
    assert [step["success"] for step in phases["rewards"]["curve"]] == [0.0, 0.0]
    assert phases["check"]["max_nats"] < 1e-4 and phases["check"]["episodes"] == 4
