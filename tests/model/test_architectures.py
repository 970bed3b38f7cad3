"""Models that train and run in process compute what `transformers` computes; the others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.engines.local.kv_cache import fitting_slots
from agentgym.errors import ConfigError, RunFolderError
from agentgym.model.architectures import ARCHITECTURES, refusal
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import empty_decoder, load_decoder, save_model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.transformers_check import check_forward

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma3"}, "model_type 'gemma3'"),
    ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
    ({"model_type": "llama", "hidden_act": "relu"}, "hidden_act 'relu'"),
    ({"model_type": "qwen3", "hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh'"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
    (
        {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope scaling 'llama3' needs a positive number 'high_freq_factor', got None",
    ),
    (
        {"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": "4"}},
        "rope scaling 'yarn' needs a positive number 'factor', got '4'",
    ),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 3}}, "with alpha are not"),
    ({"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096"),
    ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096"),
    ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"model_type": "qwen3", "layer_types": 5}, "layer_types 5 is not supported"),
    ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
    ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
    ({"model_type": "llama", "pretraining_tp": 2}, "pretraining_tp = 2 is not supported, only 1 is"),
    ({"model_type": "qwen3", "is_causal": False}, "is_causal = False is not supported"),
    ({"model_type": "llama", "residual_multiplier": 0.22}, "residual_multiplier = 0.22 is not known"),
    ({"model_type": "mistral", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ({"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
]
ACCEPTED: list[dict[str, Any]] = [
    {"model_type": "llama", "rope_theta": 500_000.0, "tie_word_embeddings": False},
    {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "head_dim": 16},
    {"model_type": "llama", "rope_scaling": None, "hidden_act": "silu", "pretraining_tp": 1},
    {"model_type": "llama", "attn_logit_softcapping": None, "rope_interleaved": False, "_name_or_path": "x"},
    {"model_type": "mistral", "sliding_window": None, "rope_theta": 1_000_000.0, "head_dim": 16},
    {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "tie_word_embeddings": True},
    {"model_type": "qwen2", "max_window_layers": 1, "layer_types": ["full_attention"] * 2},
    {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6},
    {"model_type": "qwen3", "head_dim": 16, "attention_bias": False, "attention_dropout": 0.0},
    {"model_type": "llama", "head_dim": 16, "rope_theta": 500_000.0, "rope_scaling": LLAMA_3, "mlp_bias": False},
    {"model_type": "llama", "head_dim": 16, "rope_parameters": {**LLAMA_3, "rope_theta": 500_000.0}},
    {"model_type": "qwen2", "rope_theta": 1_000_000.0, "rope_scaling": {**YARN, "type": "yarn"}},
    {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_scaling": {**YARN, "rope_type": "yarn", "beta_fast": 16, "mscale": 1},
    },
    {"model_type": "mistral", "sliding_window": None, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_configuration_that_the_decoder_computes_differently_is_refused(config: dict[str, Any], reason: str) -> None:
    assert reason in str(refusal({**SMALL, **config}))
    with pytest.raises(ConfigError, match="It computes Llama, Mistral, Qwen2 and Qwen3"):
        DecoderConfig.from_hf({**SMALL, **config})


@pytest.mark.parametrize("config", ACCEPTED, ids=lambda config: "-".join(map(str, config)))
def test_an_accepted_configuration_computes_what_transformers_computes(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    assert refusal({**SMALL, **config}) is None
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SMALL, **config})).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.3)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **config}))
    ours = load_decoder(tmp_path)
    ids_N = torch.randint(0, 60, (40,), generator=torch.Generator().manual_seed(1))
    ours_NV = ours.logits(ours.hidden_states(ids_N, PackedLayout([40]))).log_softmax(-1)
    theirs_NV = theirs(ids_N[None]).logits[0].log_softmax(-1)
    assert (ours_NV - theirs_NV).abs().max() < 2e-4
    save_model_folder(ours, tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert (saved(ids_N[None]).logits[0].log_softmax(-1) - theirs_NV).abs().max() < 2e-4


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_transformers_saves_by_default_holds_no_unknown_key(family: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **SMALL)
    config.sliding_window = None
    assert refusal({**config.to_dict(), "architectures": [ARCHITECTURES[family]]}) is None


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A model folder that transformers wrote."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", head_dim=16, **SMALL))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.3)
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_compared_with_transformers_on_its_own_tensors(foreign: Path, dtype: torch.dtype) -> None:
    model = load_decoder(foreign, dtype=dtype)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    difference = check_forward(model, foreign)
    assert difference is not None and difference < (2e-4 if dtype is torch.float32 else 1.0)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_a_model_that_transformers_computes_differently_is_named_with_the_difference(foreign: Path) -> None:
    model = load_decoder(foreign)
    settings = json.loads((foreign / "config.json").read_text())
    for name, value in (("hidden_act", "relu"), ("rms_norm_eps", 0.5)):
        (foreign / "config.json").write_text(json.dumps({**settings, name: value}))
        with pytest.raises(ConfigError, match=r"their logprobs differ by up to [0-9.]+ nats"):
            check_forward(model, foreign)


def test_a_model_without_memory_is_compared_by_two_random_layers_of_its_shape(foreign: Path) -> None:
    model = empty_decoder(foreign)
    assert all(parameter.is_meta for parameter in model.parameters())
    difference = check_forward(model, foreign)
    assert difference is not None and difference < 2e-4
    settings = json.loads((foreign / "config.json").read_text())
    for name, value in (("hidden_act", "relu"), ("rms_norm_eps", 0.5)):
        (foreign / "config.json").write_text(json.dumps({**settings, name: value}))
        with pytest.raises(ConfigError, match=r"their logprobs differ by up to [0-9.]+ nats"):
            check_forward(model, foreign)
    with pytest.raises(RunFolderError, match="lacks 1 tensors"):
        tensors = load_file(foreign / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, foreign / "model.safetensors", metadata={"format": "pt"})
        empty_decoder(foreign)


def test_a_folder_that_agentgym_wrote_is_not_compared(foreign: Path, tmp_path: Path) -> None:
    save_model_folder(load_decoder(foreign), tmp_path / "ours")
    assert check_forward(load_decoder(tmp_path / "ours"), tmp_path / "ours") is None
    assert check_forward(load_decoder(embedded_folder()), embedded_folder()) is None


def test_the_second_copy_of_the_weights_in_a_mistral_folder_is_not_read(foreign: Path) -> None:
    expected = load_decoder(foreign).state_dict()
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, foreign / "consolidated.safetensors")
    state = load_decoder(foreign).state_dict()
    assert expected.keys() == state.keys() and all(torch.equal(expected[name], state[name]) for name in expected)


def test_every_supported_class_is_one_of_transformers() -> None:
    import transformers

    assert all(hasattr(transformers, name) for name in ARCHITECTURES.values())


def test_the_cache_of_a_large_model_is_as_large_as_memory_allows() -> None:
    shape = {**SMALL, "num_hidden_layers": 28, "num_key_value_heads": 8, "num_attention_heads": 16, "head_dim": 128}
    config = DecoderConfig.from_hf({**shape, "model_type": "qwen3", "max_position_embeddings": 40_960})
    with torch.device("meta"):
        model = Decoder(config)
    slot_bytes = 2 * 28 * 8 * 128 * 4 * 40_960
    most = max(1, psutil.virtual_memory().available // 2 // slot_bytes)
    assert 1 <= fitting_slots(model, 40_960, 50) <= most
    assert fitting_slots(model, 1024, 3) == 3


def test_model_check_explains_why_the_fast_decoder_does_not_compute_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((embedded_folder() / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "gemma3"}))
    assert main(["models", "check", str(tmp_path), "--only", "template"]) == 0
    assert "not the fast decoder: model_type 'gemma3'" in " ".join(capsys.readouterr().out.split())


def test_the_plan_notes_that_transformers_computes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama", "mlp_bias": True}))
    assert main(["plan", "--model", str(tmp_path), "--learner.dtype", "bfloat16"]) == 0
    assert "transformers computes this model: mlp_bias is not supported" in " ".join(capsys.readouterr().out.split())
