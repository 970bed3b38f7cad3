"""A model of a user's own class, named by file: it is trained, resumed, exported, played and verified as others are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError, RunFolderError, UnknownName, UserCodeFault
from agentgym.evaluation import EvalConfig
from agentgym.loading import load_named
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_class import OWN_CLASS
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import backend_line, load_policy
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.model_check.checks import check_model
from agentgym.trainers.settings.held_out import HeldOutConfig

OWN = '''
import torch
from torch import nn
from transformers import Qwen3ForCausalLM


class Halved(Qwen3ForCausalLM):
    """Qwen3 with MLPs that count half."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.register_forward_hook(lambda module, given, found: 0.5 * found)


class Gated(Qwen3ForCausalLM):
    """Qwen3 with a parameter more for each MLP."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.gate = nn.Parameter(torch.ones(config.hidden_size))
            layer.mlp.register_forward_hook(lambda module, given, found: found * module.gate)


class Deaf(Qwen3ForCausalLM):
    """Layers without transformers' attention."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers[1:]:
            layer.self_attn.forward = lambda hidden_states, **given: (hidden_states, None)


class Broken(Qwen3ForCausalLM):
    def __init__(self, config):
        raise KeyError("no such layer")


class Uneven(Qwen3ForCausalLM):
    """Another model where there are several ranks."""

    def __init__(self, config):
        super().__init__(config)
        scale = 1.001 if torch.distributed.is_initialized() else 1.0
        self.model.layers[2].mlp.register_forward_hook(lambda module, given, found: scale * found)


class Alone(Qwen3ForCausalLM):
    def __init__(self, config):
        if torch.distributed.is_initialized():
            raise ValueError("no ranks")
        super().__init__(config)


class NoModel(nn.Module):
    pass


def function(config):
    return config
'''
Train = Callable[..., Any]


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


@pytest.fixture
def gated(own: str, tmp_path: Path) -> Path:
    """A folder of the class with further parameters, which are not 1."""
    folder, kind = tmp_path / "gated", load_named(f"{own}:Gated", OWN_CLASS)
    model = kind.from_pretrained(embedded_folder())  # type: ignore[attr-defined]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.fill_(0.8)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_folder() / name, folder)
    return folder


@pytest.fixture
def quick(small_run: TrainConfig) -> TrainConfig:
    config = replace(small_run, tasks=2, group_size=2, steps=2, eval=HeldOutConfig(episodes=0))
    return replace(config, checkpoint=replace(config.checkpoint, every=1))


@torch.no_grad()
def logits(model: LanguageModel, ids_T: Tensor) -> Tensor:
    return model.logits(model.hidden_states(ids_T, PackedLayout([len(ids_T)])))


def test_the_class_computes_and_its_checkpoints_are_read_by_no_other(own: str) -> None:
    folder, ids_T = embedded_folder(), torch.arange(3, 23)
    model, plain = load_policy(folder, backend=f"{own}:Halved"), load_policy(folder)
    theirs = load_named(f"{own}:Halved", OWN_CLASS).from_pretrained(folder).eval()  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = theirs(ids_T[None]).logits[0]
    torch.testing.assert_close(logits(model, ids_T), expected, atol=1e-4, rtol=1e-4)
    assert (logits(plain, ids_T) - expected).abs().max() > 0.1
    assert model.to_hf()["architectures"] == ["Halved"]
    assert backend_line(model, folder) == "the model is computed by transformers (its class is Halved)"


@pytest.mark.long
def test_a_run_of_it_is_resumed_exported_evaluated_and_verified(
    own: str, gated: Path, quick: TrainConfig, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, backend = tmp_path / "run", tmp_path / "out", f"{own}:Gated"
    config = replace(quick, model=str(gated), model_backend=backend)
    train(config, run)
    whole = (run / "episodes.jsonl.zst").read_bytes()
    shutil.rmtree(run / "checkpoints" / "step-000002")
    train(config, run, resume=True)
    assert (run / "episodes.jsonl.zst").read_bytes() == whole
    assert main(["export", str(run), str(out)]) == 2
    assert f"names code, model_backend '{backend}'" in capsys.readouterr().err and not out.exists()
    assert main(["export", str(run), str(out), "--trust-run-code"]) == 0
    assert f"--policy {out} --model-backend {backend}" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Gated"]
    words = ["eval", "--env", "TextGame-v0", "--policy", str(out), "-n", "2", "--output", str(tmp_path / "eval")]
    assert main(words) == 2
    assert "--model-backend path/to/file.py:Gated" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "eval", ignore_errors=True)
    assert main([*words, "--model-backend", backend]) == 0
    assert f"model_backend: {backend}" in (tmp_path / "eval" / "config.yaml").read_text()
    assert main(["verify", str(run), "--deep"]) == 0


@pytest.mark.long
def test_every_check_of_an_architecture_passes(own: str, gated: Path) -> None:
    results = list(check_model(gated, f"{own}:Gated"))
    assert len(results) >= 9 and [result for result in results if not result.ok] == []


@pytest.mark.long
def test_the_check_of_ranks_finds_what_they_compute_otherwise(own: str) -> None:
    (failed,) = (result for result in check_model(embedded_folder(), f"{own}:Uneven") if not result.ok)
    assert failed.name == "ranks" and " of the largest in model.layers." in failed.found


@pytest.mark.long
def test_an_error_of_a_rank_is_one_line(own: str) -> None:
    (failed,) = (result for result in check_model(embedded_folder(), f"{own}:Alone") if not result.ok)
    assert failed.name == "ranks" and "Alone cannot load the model" in failed.found and "no ranks" in failed.found
    assert "\n" not in failed.found


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Gate", UnknownName, "did you mean 'Gated'"),
        ("function", ConfigError, "is not a class. It derives from transformers.PreTrainedModel"),
        ("NoModel", ConfigError, "has no from_pretrained"),
        ("Deaf", ConfigError, "1 of 4 layers of Deaf attend through transformers' AttentionInterface"),
        ("Broken", UserCodeFault, "Broken cannot load the model in .*: KeyError: 'no such layer'"),
        ("Gated", RunFolderError, "4 missing tensors.*Gated has to be saved there with save_pretrained first"),
    ],
)
def test_mistakes_are_one_line(name: str, error: type[Exception], message: str, own: str) -> None:
    with pytest.raises(error, match=message) as caught:
        load_policy(embedded_folder(), backend=f"{own}:{name}")
    assert "\n" not in str(caught.value)


def test_what_no_engine_can_compute_is_refused_before_a_run(own: str) -> None:
    with pytest.raises(UnknownName, match="unknown model_backend 'fats': did you mean 'fast'"):
        TrainConfig(env="TextGame-v0", model_backend="fats")
    with pytest.raises(ConfigError, match="vllm has no class"):
        EvalConfig(env="TextGame-v0", engine="vllm", model_backend=f"{own}:Gated")
