"""Models of transformers are sampled as transformers computes them, or refused in one line when they are loaded."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Completion, Sampling
from agentgym.errors import ConfigError
from agentgym.model.decoder_config import folder_window
from agentgym.model.model_folder import save_model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import backend_line, load_policy
from agentgym.model.transformers_check import check_forward
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.model_check.small_models import ARCHITECTURES, save_small_model

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 32,
}


def saved(kind: str, folder: Path, **settings: Any) -> Path:
    """Saves a small random model of a kind with further settings."""
    save_small_model({"model_type": kind, **SHAPE, **settings}, folder)
    return folder


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def played(engine: LocalEngine, prompts: list[list[int]]) -> list[Completion]:
    """The greedy replies of 6 tokens, all in flight at once; then the engine is closed."""

    async def play() -> list[Completion]:
        sampling = Sampling(max_tokens=6, temperature=0.0, stop_ids=())
        try:
            return await asyncio.gather(
                *(engine.generate(prompt, sampling, session=str(number)) for number, prompt in enumerate(prompts))
            )
        finally:
            await engine.close()

    return asyncio.run(play())


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_mamba", "diffllama", "jamba", "minimax", "gpt2"])
def test_a_reply_sampled_in_process_has_the_logprobs_of_transformers(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind in ARCHITECTURES:
        save_small_model(kind, tmp_path)
    else:
        saved(kind, tmp_path)
    model = load_policy(tmp_path, backend="transformers")
    with caplog.at_level(logging.WARNING, "agentgym.model"):
        engine = LocalEngine(model, LocalEngineConfig(num_slots=2, window=64, max_step_tokens=8))
    slow = [record.message for record in caplog.records if "each token is computed with the whole" in record.message]
    assert len(slow) == (kind == "minimax")  # whose cache is of its own kind
    prompts = [[7 + 3 * i % 290 for i in range(21)], [11 + 5 * i % 290 for i in range(5)]]
    theirs_model = theirs(tmp_path)
    for prompt, reply in zip(prompts, played(engine, prompts), strict=True):
        ids_T = torch.tensor([*prompt, *reply.ids])
        with torch.no_grad():
            logprobs_TV = (
                theirs_model(input_ids=ids_T[None], use_cache=False).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            )
        assert logprobs_TV.argmax(-1).tolist() == list(reply.ids)
        expected_T = logprobs_TV.gather(1, ids_T[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(reply.logprobs), expected_T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "use_bidirectional_attention": True}),
        ("llama", {"is_causal": False}),
        ("qwen3", {"head_dim": 16, "is_causal": False}),
        ("mistral", {"is_causal": False, "sliding_window": None}),
    ],
)
def test_a_model_that_attends_to_later_tokens_is_refused_when_it_is_loaded(
    kind: str, settings: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"attends to later tokens \(bidirectional attention"):
        load_policy(saved(kind, tmp_path, **settings), dtype=dtype)


@pytest.mark.parametrize("kind", ["granitemoehybrid", "qwen3_next", "gpt_oss", "jamba"])
def test_the_rounding_of_bfloat16_is_no_other_computation(kind: str, tmp_path: Path) -> None:
    save_small_model(kind, tmp_path)
    model = load_policy(tmp_path, dtype="bfloat16")
    assert isinstance(model, TransformersModel) and model.continues


def test_an_encoder_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a linear output head, or with a bias in it"):
        load_policy(saved("bert", tmp_path))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("falcon", {}),
        ("gptj", {"rotary_dim": 8}),
        ("bloom", {}),
        ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
        ("doge", {}),
        ("deepseek_v32", {**ARCHITECTURES["deepseek_v3"], "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}),
    ],
)
def test_attention_that_cannot_be_replaced_is_refused_in_one_line(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match="its attention does not go through transformers' AttentionInterface"
    ) as caught:
        load_policy(saved(kind, tmp_path, **settings))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rotary embeddings change beyond 32 tokens."""
    rope = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "pad_token_id": 0}
    return saved("phi3", tmp_path_factory.mktemp("longrope"), **rope)


@pytest.mark.parametrize("lengths", [(20, 30), (40, 60), (32, 33), (20, 40, 7, 64)])
@torch.no_grad()
def test_rows_on_both_sides_of_the_longrope_threshold_have_their_own_logprobs(
    lengths: tuple[int, ...], longrope: Path
) -> None:
    model, theirs_model = load_policy(longrope), theirs(longrope)
    shared = torch.arange(3, 100)
    rows: list[Tensor] = [torch.cat([shared[: length - 3], torch.tensor([length, 5, 9])]) for length in lengths]
    ids_N = torch.cat(rows)
    actual_NV = model.logits(model.hidden_states(ids_N, PackedLayout(lengths, ids_N=ids_N))).log_softmax(-1)
    expected_NV = torch.cat([theirs_model(input_ids=row[None], use_cache=False).logits[0] for row in rows]).log_softmax(
        -1
    )
    torch.testing.assert_close(actual_NV, expected_NV, atol=5e-5, rtol=0)


def test_nothing_is_sampled_beyond_the_longrope_threshold_and_a_line_notes_it(longrope: Path) -> None:
    model = load_policy(longrope)
    assert model.context_window == folder_window(longrope) == 32
    line = backend_line(model, longrope)
    assert line is not None and "its rotary embeddings change beyond 32 tokens (longrope)" in line
    with pytest.raises(ConfigError, match="window 33 is over the model's context window 32"):
        LocalEngine(model, LocalEngineConfig(window=33))


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"])
def test_a_saved_model_promises_no_draft_layers_that_were_not_saved(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    save_small_model("qwen3_5_text", tmp_path)
    drafts = {"mtp.norm.weight": torch.ones(4), "mtp.fc.weight": torch.ones(4, 8)}
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | drafts, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: 1, "mtp_use_dedicated_embeddings": False}))
    with caplog.at_level(logging.WARNING, "agentgym.model"):
        model = load_policy(tmp_path)
    assert isinstance(model, TransformersModel)
    own = [record.message.partition(":")[0] for record in caplog.records if record.name.startswith("agentgym")]
    assert own == ["Qwen3_5ForCausalLM computes no layers of multi-token prediction (MTP)"]
    save_model_folder(model, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written[key] == 0 and written["hidden_size"] == config["hidden_size"]
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == weights.keys()
    caplog.clear()
    load_policy(tmp_path / "saved")
    assert not [record for record in caplog.records if record.name.startswith("agentgym")]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_5_text", "mtp.fc.weight"),
        ("qwen3_5_text", "model.visual.patch_embed.proj.weight"),
        ("deepseek_v3", "model.layers.61.eh_proj.weight"),
        ("glm4_moe", "model.layers.46.mlp.down_proj.weight"),
    ],
)
def test_stored_tensors_that_a_class_passes_over_are_named_once(
    kind: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    save_small_model(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_policy(tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("agentgym")]
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {name: torch.ones(4, 8)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_policy(tmp_path)
    (record,) = (record for record in caplog.records if record.name.startswith("agentgym"))
    assert f"tensors that are neither trained nor saved: 1, the first is {name}" in record.message


def test_a_mixture_whose_config_asks_for_router_logits_is_sent_to_other_processes(tmp_path: Path) -> None:
    save_small_model("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    model = load_policy(tmp_path)
    assert isinstance(model, TransformersModel) and model.balance_coefficient > 0
    assert pickle.loads(pickle.dumps(model.like())).balance_coefficient == model.balance_coefficient
    assert model.to_hf()["output_router_logits"] is True


@pytest.mark.parametrize("kind", ["evil", "qwen3"])
def test_code_that_a_folder_brings_is_neither_run_nor_asked_about(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_model("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": kind, "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    questions: list[str] = []

    def agree(question: str) -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    if kind == "evil":
        with pytest.raises(ConfigError, match="contains custom code"):
            load_policy(tmp_path, backend="transformers")
    else:
        load_policy(tmp_path, backend="transformers")
        check_forward(load_policy(tmp_path), tmp_path)
    assert not questions and not (tmp_path / "ran").exists()


def test_a_type_of_weights_that_torch_lacks_is_refused_by_name(tmp_path: Path) -> None:
    save_small_model("qwen3", tmp_path)
    model, config = load_policy(tmp_path), json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "../x"}))
    with pytest.raises(ConfigError, match=r"cannot read the configuration in .*'\.\./x'"):
        check_forward(model, tmp_path)
    with pytest.raises(ConfigError, match=r"'\.\./x'"):
        load_policy(tmp_path, backend="transformers")
