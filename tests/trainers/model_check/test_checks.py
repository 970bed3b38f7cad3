"""The checks of a model find what is right and what is wrong with it, and the stored results are those of today."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import architectures_page
from safetensors.torch import load_file, save_file

from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.errors import ConfigError
from agentgym.model.policy import load_policy
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.model_check import checks
from agentgym.trainers.model_check.checks import CHECKS, check_model
from agentgym.trainers.model_check.known import FAMILIES, known_models
from agentgym.trainers.model_check.small_models import ARCHITECTURES, save_small_model, shrink
from agentgym.trainers.parallel import learner_ranks

README = Path(__file__).parents[3] / "README.md"
PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("architecture", ["llama:llama3", "qwen3_moe", "qwen3_5_text", "qwen3_vl", "jamba"])
def test_what_is_stored_of_an_architecture_is_found_again(architecture: str, tmp_path: Path) -> None:
    save_small_model(architecture, tmp_path)
    stored = {model.architecture: model for model in known_models()[1]}[architecture]
    outcomes = {result.name: result.ok for result in check_model(tmp_path)}
    is_mixture = architecture in ("qwen3_moe", "jamba")
    assert tuple(outcomes) == tuple(name for name in CHECKS if name != "replay" or is_mixture)
    assert outcomes == {name: passed for name, (passed, _) in stored.results.items() if name in CHECKS}


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("check", "damage"),
    [("logprobs", "states"), ("gradients", "gradient"), ("gradients", "no number"), ("export", "published")],
)
def test_a_wrong_computation_is_found(check: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small_model("gemma2", tmp_path)
    states, published = TransformersModel.states, TransformersModel.published_tensors

    def own_states(self: TransformersModel, ids: torch.Tensor, *rest: object) -> torch.Tensor:
        own: torch.Tensor = states(self, ids, *rest)  # type: ignore[arg-type]
        if damage == "no number":
            return own + (own * 0).abs().sqrt()  # the same states, and gradients that are no numbers
        if damage == "gradient":
            return own * 0.9 + (own * 0.1).detach()
        return own * 1.05

    def own_tensors(self: TransformersModel, *rest: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor * 1.05) for name, tensor in published(self, *rest))

    if damage == "published":
        monkeypatch.setattr(TransformersModel, "published_tensors", own_tensors)
    else:
        monkeypatch.setattr(TransformersModel, "states", own_states)
    failed = [result.name for result in check_model(tmp_path) if not result.ok]
    assert check in failed or (check == "logprobs" and failed == ["loads"])


@pytest.mark.long
def test_a_shape_is_checked_without_its_weights(tmp_path: Path) -> None:
    config = {**json.loads((_shape(tmp_path / "big") / "config.json").read_text()), "num_hidden_layers": 80}
    small = shrink({**config, "layer_types": config["layer_types"] * 20, "num_experts": 128})
    assert (small["num_hidden_layers"], small["num_experts"], len(small["layer_types"])) == (8, 8, 8)
    assert small["hidden_size"] == config["hidden_size"]
    with pytest.raises(ConfigError, match=r"quantized weights \(awq\)"):
        shrink({**config, "quantization_config": {"quant_method": "awq"}})
    save_small_model(small, tmp_path / "small")
    assert all(result.ok for result in check_model(tmp_path / "small"))


@pytest.mark.long
def test_ranks_compute_a_small_model_of_the_shape_of_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**json.loads((_shape(tmp_path / "first") / "config.json").read_text()), "vocab_size": 700}
    save_small_model(config, tmp_path / "large")
    subject = checks._Subject(tmp_path / "large", load_policy(tmp_path / "large"), None)
    assert checks._check_ranks(subject)[1].endswith("of the largest")
    monkeypatch.setattr(learner_ranks, "LARGE_MODEL", 1)
    passed, text = checks._check_ranks(subject)
    assert passed and text.endswith("of the largest, of a small model")


def _shape(folder: Path) -> Path:
    save_small_model("qwen3_moe", folder)
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("layer_types", ["full_attention"] * config["num_hidden_layers"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_that_cannot_be_loaded_has_one_result(tmp_path: Path) -> None:
    save_small_model("gemma2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (result,) = check_model(tmp_path)
    assert not result.ok
    assert "model.norm.weight" in result.found


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot make a small model"):
        save_small_model("kimi_k2", tmp_path)


def test_every_architecture_is_stored_and_on_the_page() -> None:
    models = known_models()[1]
    assert [model.architecture for model in models] == list(ARCHITECTURES)
    assert {family for family in FAMILIES.values() if family not in FORMATS} == set()
    assert FAMILIES.keys() <= {name.partition(":")[0] for name in ARCHITECTURES}
    assert architectures_page() == PAGE.read_text(encoding="utf-8"), "run python docs/pages.py"


def test_most_architectures_train_with_packed_rows_and_the_others_unpacked() -> None:
    loaded = [model for model in known_models()[1] if model.results["loads"][0]]
    trained = [model for model in loaded if model.results["logprobs"][0] and model.results["gradients"][0]]
    packed = [model for model in trained if "not computed again" in model.results["prefix"][1]]
    assert len(loaded) >= 50
    assert len(packed) >= 45
    assert len(trained) == len(loaded)
    assert f"[{len(loaded)} architectures](docs/architectures.md)" in README.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_fast_decoder_is_checked_by_its_own_steps(tmp_path: Path) -> None:
    save_small_model("qwen3", tmp_path)
    results = {result.name: result for result in check_model(tmp_path)}
    assert results["loads"].found == "fast decoder"
    assert all(result.ok for result in results.values())
