"""Any model of transformers computes packed sequences, with the logprobs, gradients and weights that it has alone."""

from __future__ import annotations

import asyncio
import json
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
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import backend_line, load_policy
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.learner.token_logprobs import score_targets

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
ROUTED = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LINEAR = {f"linear_{name}": size for name, size in [("num_key_heads", 2), ("num_value_heads", 2)]}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3_moe": {"head_dim": 16, **MOE},
    "deepseek_v3": {"num_key_value_heads": 4, **LATENT, **ROUTED},
    "cohere2": {"sliding_window": 8},
    "llama4_text": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 16,
    },
    "qwen3_5_text": {"head_dim": 16, **LINEAR},
    "jamba": {},
}
"""Small configurations: soft caps, sinks, sliding windows, chunks, latent attention, experts, and a hybrid."""


def _make_folder(kind: str, folder: Path) -> Any:
    """Saves a random model of a kind and returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, **MODELS[kind]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=[kind for kind in MODELS if kind != "jamba"])
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
    found_NV = ours.logits(ours.hidden_states(ids_N, layout)).log_softmax(-1)
    wanted_NV = torch.cat([theirs(input_ids=row[None], use_cache=False).logits[0] for row in rows]).log_softmax(-1)
    torch.testing.assert_close(found_NV, wanted_NV, atol=5e-5, rtol=0)
    target_N1 = ids_N.roll(-1)[:, None]
    for logprobs_NV in (found_NV, wanted_NV):
        logprobs_NV.gather(1, target_N1).mean().backward()
    for (name, own), wanted in zip(ours.hf.named_parameters(), theirs.parameters(), strict=True):
        if wanted.grad is None:
            assert own.grad is None or not own.grad.any(), name
            continue
        torch.testing.assert_close(own.grad, wanted.grad, atol=1e-4 * float(wanted.grad.abs().max()) + 1e-6, rtol=0)


def test_only_wanted_entries_have_a_state(pair: tuple[Any, TransformersModel, Path]) -> None:
    ours, ids_N = pair[1], torch.cat(_rows())
    seqlens = [len(row) for row in _rows()]
    wanted_N = torch.arange(len(ids_N)) % 3 == 0
    some = ours.hidden_states(ids_N, PackedLayout(seqlens, ids_N=ids_N, wanted_N=wanted_N))
    every = ours.hidden_states(ids_N, PackedLayout(seqlens, ids_N=ids_N))
    torch.testing.assert_close(some, every[wanted_N], atol=1e-5, rtol=1e-5)


def test_weights_are_published_as_they_were_saved(pair: tuple[Any, TransformersModel, Path]) -> None:
    _, ours, folder = pair
    saved = load_file(folder / "model.safetensors")
    published = ours.published_tensors()
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in saved.items())


def test_a_hybrid_takes_rows_of_their_own_and_says_so(pair: tuple[Any, TransformersModel, Path]) -> None:
    theirs, ours, folder = pair
    is_hybrid = theirs.config.model_type == "qwen3_5_text"
    assert ours.packs is not is_hybrid
    line = backend_line(ours, folder)
    assert line is not None
    assert ("not packed" in line) is is_hybrid


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _make_folder("qwen3", tmp_path)
    return tmp_path


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
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"quantized weights \(fp8\) are not supported"):
        load_policy(folder)


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "kimi_k9"}')
    with pytest.raises(ConfigError, match="transformers cannot load the model"):
        load_policy(folder)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_capped_logits_have_the_scores_and_gradients_of_the_formula(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden_NE, head_VE = (torch.randn(size, 8, generator=generator).double() * 2 for size in (50, 20))
    target_N = torch.randint(0, 20, (50,), generator=generator)
    weight_N = torch.randn(2, 50, generator=generator)
    hidden, head = hidden_NE.float().requires_grad_(), head_VE.float().requires_grad_()
    found = score_targets(hidden, head, target_N, temperature, softcap=5.0)
    (weight_N[0] * found.logp_N + weight_N[1] * found.entropy_N).sum().backward()
    hidden_NE.requires_grad_()
    head_VE.requires_grad_()
    log_p_NV = (5.0 * torch.tanh(hidden_NE @ head_VE.T / 5.0) / temperature).log_softmax(-1)
    logp_N, entropy_N = log_p_NV.gather(1, target_N[:, None])[:, 0], -(log_p_NV.exp() * log_p_NV).sum(-1)
    (weight_N[0] * logp_N + weight_N[1] * entropy_N).sum().backward()
    torch.testing.assert_close(found.logp_N.double(), logp_N, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy_N.double(), entropy_N, atol=1e-5, rtol=0)
    for own, wanted in ((hidden, hidden_NE), (head, head_VE)):
        assert own.grad is not None and wanted.grad is not None
        torch.testing.assert_close(own.grad.double(), wanted.grad, atol=1e-4, rtol=0)


def test_a_row_of_the_engine_has_the_same_bits_whatever_is_in_flight(pair: tuple[Any, TransformersModel, Path]) -> None:
    ours = pair[1]
    assert batch_invariance_findings(TransformersStep(ours, SlotCache(ours, 6, 192))) == []


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
        wanted_T = logprobs_TV[len(prompt) - 1 : -1].gather(1, ids_T[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(own.logprobs), wanted_T, atol=1e-4, rtol=0)


def test_a_model_whose_passes_do_not_continue_a_state_is_not_sampled_in_process(tmp_path: Path) -> None:
    _make_folder("jamba", tmp_path)
    with pytest.raises(ConfigError, match="does not continue a state: sample on a server"):
        LocalEngine(load_policy(tmp_path, backend="transformers"))
