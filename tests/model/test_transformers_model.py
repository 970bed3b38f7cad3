"""Any model of transformers computes packed sequences, with the logprobs, gradients and weights that it has alone."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentgym.engines.local.batch_invariance import batch_invariance_findings
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.transformers_step import TransformersStep
from agentgym.engines.protocol import Completion, Sampling
from agentgym.errors import ConfigError, RunFolderError
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import published_views, save_model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import backend_line, load_policy
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.learner.token_logprobs import score_targets
from agentgym.trainers.model_check.small_models import save_small_model

KINDS = [
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
    "cohere2",
    "llama4_text",
    "qwen3_5_text",
]
"""Soft caps, sinks, sliding windows, chunks, latent attention, experts, and a hybrid."""


def _make_folder(kind: str, folder: Path) -> Any:
    """Saves a random model of a kind and returns it."""
    from transformers import AutoModelForCausalLM

    save_small_model(kind, folder)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, TransformersModel, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = _make_folder(request.param, folder)
    ours = load_policy(folder, backend="transformers")
    assert isinstance(ours, TransformersModel)
    return theirs, ours, folder


def _rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 300, (40,), generator=generator)
    return [torch.cat([shared, torch.randint(3, 300, (size,), generator=generator)]) for size in (17, 9, 30)]


@pytest.mark.parametrize("recomputes", [False, True])
def test_packed_rows_have_the_logprobs_and_gradients_of_each_row_alone(
    pair: tuple[Any, TransformersModel, Path], recomputes: bool
) -> None:
    theirs, ours, _ = pair
    rows = _rows()
    ids_N = torch.cat(rows)
    layout = PackedLayout([len(row) for row in rows], ids_N=ids_N)
    assert layout.num_tokens == len(ids_N) - 80  # the prefix of 40 is computed once
    ours.set_recompute(recomputes)
    ours.zero_grad()
    theirs.zero_grad()
    actual_NV = ours.logits(ours.hidden_states(ids_N, layout)).log_softmax(-1)
    expected_NV = torch.cat([theirs(input_ids=row[None], use_cache=False).logits[0] for row in rows]).log_softmax(-1)
    torch.testing.assert_close(actual_NV, expected_NV, atol=5e-5, rtol=0)
    target_N1 = ids_N.roll(-1)[:, None]
    for logprobs_NV in (actual_NV, expected_NV):
        logprobs_NV.gather(1, target_N1).mean().backward()
    for (name, own), expected in zip(ours.hf.named_parameters(), theirs.parameters(), strict=True):
        if expected.grad is None:
            assert own.grad is None or not own.grad.any(), name
            continue
        torch.testing.assert_close(own.grad, expected.grad, atol=1e-4 * float(expected.grad.abs().max()) + 1e-6, rtol=0)


def test_only_wanted_entries_have_a_state(pair: tuple[Any, TransformersModel, Path]) -> None:
    ours, ids_N = pair[1], torch.cat(_rows())
    seqlens = [len(row) for row in _rows()]
    mask_N = torch.arange(len(ids_N)) % 3 == 0
    some = ours.hidden_states(ids_N, PackedLayout(seqlens, ids_N=ids_N, mask_N=mask_N))
    every = ours.hidden_states(ids_N, PackedLayout(seqlens, ids_N=ids_N))
    torch.testing.assert_close(some, every[mask_N], atol=1e-5, rtol=1e-5)


def test_weights_are_published_as_they_were_saved(pair: tuple[Any, TransformersModel, Path]) -> None:
    _, ours, folder = pair
    saved = load_file(folder / "model.safetensors")
    published = dict(ours.published_tensors())
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in saved.items())


def test_weights_from_outside_reach_every_tensor_of_a_copy(
    pair: tuple[Any, TransformersModel, Path], tmp_path: Path
) -> None:
    _, ours, _ = pair
    duplicate, generator = copy.deepcopy(ours), torch.Generator().manual_seed(2)
    new = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in ours.published_tensors()}
    with torch.no_grad():
        for name, view in published_views(duplicate):
            view.copy_(new[name])
    save_model_folder(duplicate, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == new.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in new.items())


def test_a_hybrid_model_takes_unpacked_rows_and_notes_it(pair: tuple[Any, TransformersModel, Path]) -> None:
    theirs, ours, folder = pair
    is_hybrid = theirs.config.model_type == "qwen3_5_text"
    assert ours.packs is not is_hybrid
    line = backend_line(ours, folder)
    assert line is not None
    assert ("not packed" in line) is is_hybrid


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the architecture that the fast decoder computes, for all tests to copy."""
    folder = tmp_path_factory.mktemp("saved")
    save_small_model("qwen3", folder)
    return folder


@pytest.fixture
def folder(saved_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_folder, tmp_path / "model")


def test_the_fast_decoder_is_chosen_where_it_computes_the_architecture(folder: Path) -> None:
    fast: LanguageModel = load_policy(folder)
    assert isinstance(fast, Decoder)
    assert backend_line(fast, folder) is None
    slow = load_policy(folder, backend="transformers")
    ids_N = torch.cat(_rows())
    layout = PackedLayout([len(row) for row in _rows()], ids_N=ids_N)
    torch.testing.assert_close(fast.hidden_states(ids_N, layout), slow.hidden_states(ids_N, layout), atol=1e-4, rtol=0)
    assert fast.kv_shapes == slow.kv_shapes


def test_a_folder_without_all_tensors_is_refused(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunFolderError, match=r"1 missing tensors, the first is .*layers.2.mlp.down_proj"):
        load_policy(folder, backend="transformers")


def test_quantized_weights_are_refused_by_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match=r"quantized weights \(gptq\) are not supported"):
        load_policy(folder)


def _to_fp8(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Quantizes linear layers in blocks of 32 x 32; returns what is stored, its values, and the configuration."""
    stored, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            blocks = weight.view(weight.shape[0] // 32, 32, weight.shape[1] // 32, 32)
            scale = blocks.abs().amax((1, 3)) / 448
            small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            stored |= {name: small.view_as(weight), f"{name}_scale_inv": scale}
            plain[name] = (small.float() * scale[:, None, :, None]).reshape(weight.shape)
    return stored, plain, {"quant_method": "fp8", "weight_block_size": [32, 32]}


def _to_mxfp4(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Puts random numbers of 4 bits, with a scale for each 32, in place of the experts."""
    stored, plain = dict(tensors), dict(tensors)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        shape = (*tensors[name].transpose(1, 2).shape[:2], tensors[name].shape[1] // 32)  # experts, outputs, blocks
        codes, scales = torch.randint(0, 16, (*shape, 32)), torch.randint(120, 126, shape, dtype=torch.uint8)
        decoded = torch.cat([values, -values])[codes] * 2.0 ** (scales[..., None].float() - 127)
        del stored[name]
        stored |= {f"{name}_blocks": (codes[..., 0::2] + 16 * codes[..., 1::2]).byte(), f"{name}_scales": scales}
        plain[name] = decoded.flatten(2).transpose(1, 2)
    return stored, plain, {"quant_method": "mxfp4"}


@pytest.mark.parametrize(("name", "quantize"), [("qwen3", _to_fp8), ("qwen3_moe", _to_fp8), ("gpt_oss", _to_mxfp4)])
def test_quantized_weights_are_loaded_and_saved_as_plain_ones(name: str, quantize: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_small_model(name, tmp_path)
    stored, plain, settings = quantize(load_file(tmp_path / "model.safetensors"))
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    model = load_policy(tmp_path)
    views = dict(published_views(model))
    assert views.keys() == plain.keys() and len(stored) > len(plain)
    for key, tensor in plain.items():
        assert torch.equal(views[key], tensor.float()), key
    save_model_folder(model, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"model_type": "kimi_k9"}, "`kimi_k9`"), ({"model_type": "gemma2", "num_attention_heads": "four"}, "got str")],
)
def test_a_configuration_that_transformers_refuses_is_refused_in_one_line(
    settings: dict[str, object], reason: str, folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="transformers cannot load the model") as caught:
        load_policy(folder)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_capped_logits_have_the_scores_and_gradients_of_the_formula(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden_NE, head_VE = (torch.randn(size, 8, generator=generator).double() * 2 for size in (50, 20))
    target_N = torch.randint(0, 20, (50,), generator=generator)
    weight_N = torch.randn(2, 50, generator=generator)
    hidden, head = hidden_NE.float().requires_grad_(), head_VE.float().requires_grad_()
    scores = score_targets(hidden, head, target_N, temperature, softcap=5.0)
    (weight_N[0] * scores.logp_N + weight_N[1] * scores.entropy_N).sum().backward()
    hidden_NE.requires_grad_()
    head_VE.requires_grad_()
    log_p_NV = (5.0 * torch.tanh(hidden_NE @ head_VE.T / 5.0) / temperature).log_softmax(-1)
    logp_N, entropy_N = log_p_NV.gather(1, target_N[:, None])[:, 0], -(log_p_NV.exp() * log_p_NV).sum(-1)
    (weight_N[0] * logp_N + weight_N[1] * entropy_N).sum().backward()
    torch.testing.assert_close(scores.logp_N.double(), logp_N, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropy_N.double(), entropy_N, atol=1e-5, rtol=0)
    for own, expected in ((hidden, hidden_NE), (head, head_VE)):
        assert own.grad is not None and expected.grad is not None
        torch.testing.assert_close(own.grad.double(), expected.grad, atol=1e-4, rtol=0)


@pytest.mark.long
def test_a_row_of_the_engine_has_the_same_bits_whatever_is_in_flight(pair: tuple[Any, TransformersModel, Path]) -> None:
    ours = pair[1]
    assert batch_invariance_findings(TransformersStep(ours, SlotCache(ours, 6, 192))) == []


@pytest.mark.long
def test_two_turns_of_the_local_engine_have_the_logprobs_of_the_model(
    pair: tuple[Any, TransformersModel, Path],
) -> None:
    theirs, ours, _ = pair
    prompts = [row[:size].tolist() for row, size in zip(_rows(), (57, 20, 45), strict=True)]
    prompts.append(prompts[0])  # which finds its prefix in the slot of another session

    async def reply(engine: LocalEngine, number: int, prompt: list[int]) -> Completion:
        return await engine.generate(prompt, Sampling(max_tokens=12, seed=number, stop_ids=()), session=str(number))

    async def play() -> list[tuple[list[int], Completion]]:
        engine = LocalEngine(ours, LocalEngineConfig(num_slots=4, window=128, max_step_tokens=32))
        try:
            first = await asyncio.gather(*(reply(engine, number, prompt) for number, prompt in enumerate(prompts)))
            longer = [[*prompt, *own.ids, 5, 6, 7] for prompt, own in zip(prompts, first, strict=True)]
            second = await asyncio.gather(*(reply(engine, number, prompt) for number, prompt in enumerate(longer)))
        finally:
            await engine.close()
        return list(zip([*prompts, *longer], [*first, *second], strict=True))

    for prompt, own in asyncio.run(play()):
        ids_T = torch.tensor([*prompt, *own.ids])
        with torch.no_grad():
            logprobs_TV = theirs(input_ids=ids_T[None], use_cache=False).logits[0].log_softmax(-1)
        expected_T = logprobs_TV[len(prompt) - 1 : -1].gather(1, ids_T[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(own.logprobs), expected_T, atol=1e-4, rtol=0)
