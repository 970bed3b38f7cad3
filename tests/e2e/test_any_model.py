"""A model that transformers computes is taught, trained, resumed, verified and exported by the usual commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentgym.cli.main import main
from agentgym.embedded import embedded_folder

SMALL = ["--tasks", "2", "--group-size", "2", "--eval-episodes", "0", "--limits.turn-tokens", "12"]

VARIED = """
from agentgym.rewards import Reward


def varied(trajectory, task):
    return Reward(sum(int(row.ids.sum()) for row in trajectory.rows) % 7 / 7)
"""
"""A reward that differs between episodes, so that even a random model has something to learn."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 (sliding windows, scaled embeddings) with the tokenizer of the embedded model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gemma")
    vocab_size = json.loads((embedded_folder() / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=1024,
        sliding_window=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    for pattern in ("tokenizer*", "chat_template*", "*.jinja", "special_tokens_map.json"):
        for file in embedded_folder().glob(pattern):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def run(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, one of them resumed, that began with a taught model."""
    folder = tmp_path_factory.mktemp("runs")
    taught, path = str(folder / "taught"), folder / "run"
    assert main(["sft", "--env", "TextGame-v0", "--model", str(gemma), "--steps", "2", "--output", taught]) == 0
    (folder / "varied.py").write_text(VARIED)
    reward = ["--reward.function", f"{folder / 'varied.py'}:varied"]
    train = ["train", "--env", "TextGame-v0", "--model", taught, *SMALL, *reward, "--output", str(path)]
    assert main([*train, "--steps", "1"]) == 0
    assert main([*train, "--steps", "2", "--resume"]) == 0
    return path


def test_teaching_and_training_change_the_weights(gemma: Path, run: Path) -> None:
    folders = [gemma, run.parent / "taught", run / "checkpoints" / "step-000002"]
    first, taught, trained = (load_file(folder / "model.safetensors") for folder in folders)
    assert first.keys() == taught.keys() == trained.keys()
    assert not torch.equal(first["model.norm.weight"], taught["model.norm.weight"])
    assert not torch.equal(taught["model.norm.weight"], trained["model.norm.weight"])


def test_the_engine_samples_with_the_logprobs_of_the_learner(run: Path) -> None:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["mismatch_max"] < 1e-3 for step in steps)
    assert all(step["mfu"] is None for step in steps)


def test_the_run_is_sound(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "--deep"]) == 0
    assert "sound" in capsys.readouterr().out


def test_the_exported_model_is_that_of_the_checkpoint(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert exported.config.model_type == "gemma3_text"
    saved = load_file(run / "checkpoints" / "step-000002" / "model.safetensors")
    assert torch.equal(exported.model.norm.weight, saved["model.norm.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--learner.lora.rank", "4"], "learner.lora is not supported"),
        (["--executor", "ray"], "trains in one process"),
        (["--model-backend", "fast"], "the fast decoder does not compute this model"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(
    gemma: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    train = ["train", "--env", "TextGame-v0", "--model", str(gemma), *SMALL, "--output", str(tmp_path / "run")]
    assert main([*train, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()
