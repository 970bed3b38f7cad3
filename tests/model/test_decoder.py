"""The decoder computes what `transformers` computes, from the same saved folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from agentgym.errors import AgentGymError, EngineError, RunFolderError
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import load_decoder, own_tensors, published_views, save_model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.published_weights import LoraWeights

FAMILIES: dict[str, dict[str, bool]] = {
    "qwen3": {"qk_norm": True},
    "qwen2": {"qkv_bias": True},
    "llama": {"tied": False},
    "mistral": {},
}


def tiny(family: str) -> Decoder:
    config = DecoderConfig(
        family=family,
        vocab_size=100,
        width=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_width=16,
        ffn_width=96,
        context_window=128,
        **FAMILIES[family],  # type: ignore[arg-type]
    )
    model = Decoder(config).initialize(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_decoder_gives_the_logits_of_transformers_for_packed_sequences(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny(family)
    save_model_folder(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids_N = torch.randint(0, 100, (30,), generator=torch.Generator().manual_seed(1))
    ours_NV = model.logits(model.hidden_states(ids_N, PackedLayout([10, 7, 13])))
    theirs_NV = torch.cat([theirs(part[None]).logits[0] for part in ids_N.split([10, 7, 13])])
    assert (ours_NV - theirs_NV).abs().max() < 1e-5


def test_a_saved_decoder_loads_bitwise(tmp_path: Path) -> None:
    model = tiny("qwen3")
    save_model_folder(model, tmp_path)
    again = load_decoder(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_activation_checkpointing_keeps_less_and_has_the_same_gradients() -> None:
    ids_N = torch.randint(0, 100, (90,), generator=torch.Generator().manual_seed(1))
    layout = PackedLayout([40, 50], mask_N=ids_N > 50)
    model, results = tiny("qwen3"), []
    for recomputes in (False, True):
        num_bytes = 0
        for layer in model.layers:
            layer.recomputes = recomputes

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_bytes
            num_bytes += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(ids_N, layout, lambda hidden_ME, head_VE: (hidden_ME @ head_VE.T).logsumexp(-1).sum())
        results.append((num_bytes, torch.autograd.grad(loss, list(model.parameters()))))
    (all_kept, expected), (few_kept, gradients) = results
    assert few_kept < all_kept / 2
    assert all(torch.equal(left, right) for left, right in zip(gradients, expected, strict=True))


def test_a_missing_or_torn_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"config\.json"):
        load_decoder(tmp_path / "absent")
    save_model_folder(tiny("qwen3"), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(RunFolderError, match="torn"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("vocab_size", 10**12, "has shape"),
        ("hidden_size", 10**12, "has shape"),
        ("intermediate_size", 10**9, "has shape"),
        ("head_dim", 10**11, "has shape"),
        ("max_position_embeddings", 10**12, "at most 16,777,216"),
        ("num_hidden_layers", 10**9, "at most 10,000 layers"),
    ],
)
def test_a_size_that_no_tensor_has_is_refused_before_it_takes_memory(
    key: str, value: int, why: str, tmp_path: Path
) -> None:
    save_model_folder(tiny("qwen3"), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), key: value}))
    with pytest.raises(AgentGymError, match=why):
        load_decoder(tmp_path)


def test_what_is_no_file_of_settings_or_weights_is_refused_at_once(tmp_path: Path) -> None:
    save_model_folder(tiny("qwen3"), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    text, _ = config.read_text(), config.write_text('{"a":' * 100_000)
    with pytest.raises(RunFolderError, match="is not JSON"):
        load_decoder(tmp_path)
    config.write_text(text)
    weights.unlink()
    for make in (os.mkfifo, os.mkdir):
        make(weights)
        with pytest.raises(RunFolderError, match="not a safetensors file: not a file"):
            load_decoder(tmp_path)
        (os.rmdir if weights.is_dir() else os.unlink)(weights)


def test_an_architecture_that_would_be_computed_differently_is_refused() -> None:
    with pytest.raises(AgentGymError, match="gpt2"):
        DecoderConfig.from_hf({"model_type": "gpt2"})


def test_weights_are_matched_by_name_and_shape_and_a_mismatch_is_refused() -> None:
    model, source = tiny("qwen3"), tiny("qwen3")
    assert own_tensors(model, {}) == []
    weights = dict(published_views(source))
    pairs = own_tensors(model, weights)
    assert len(pairs) == len(weights)
    assert all(own.shape == new.shape and own.data_ptr() != new.data_ptr() for own, new in pairs)
    name = "model.norm.weight"
    for odd, message in (
        ({name: weights[name]}, "weights of another model"),
        ({**weights, "more": weights[name]}, "the first is 'more'"),
        ({**weights, name: torch.zeros(3)}, name),
        (LoraWeights(tensors={}, config={}), "no adapter alone"),
    ):
        with pytest.raises(EngineError, match=message):
            own_tensors(model, odd)
