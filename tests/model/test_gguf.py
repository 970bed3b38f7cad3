"""A model in GGUF is dequantized once, computes what transformers computes of the file, or is refused in one line."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.errors import RunFolderError
from agentgym.model.gguf.gguf_file import read_header
from agentgym.model.model_name import is_model_id, model_folder, names_model, revised_name
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import load_policy

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, FFN, LAYERS = 64, 4, 2, 16, 96, 2
SMALL = ["--tasks", "1", "--group-size", "2", "--eval.episodes", "0", "--limits.turn-tokens", "8"]
MATRIX = (32, 34)
"""The numbers of a block of the type Q8_0 and its bytes."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def small_header() -> bytes:
    """A header with settings of several types and one tensor, and the tensor."""
    settings = [
        text("general.architecture") + struct.pack("<I", 8) + text("qwen2"),
        text("qwen2.block_count") + struct.pack("<II", 4, 2),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
        text("tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.5, 1.5),
    ]
    tensor = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 2, 8, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, len(settings)) + b"".join(settings) + tensor
    return header + bytes(-len(header) % 32 + 2 * MATRIX[1])


def test_a_header_holds_its_settings_and_the_types_of_its_tensors(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(small_header())
    header = read_header(tmp_path / "m.gguf", {8: MATRIX})
    assert header.settings == {
        "general.architecture": "qwen2",
        "qwen2.block_count": 2,
        "tokenizer.ggml.tokens": 2,
        "tokenizer.ggml.scores": 2,
    }
    assert header.types == {"token_embd.weight": 8} and header.num_weights == 64


def test_a_file_that_was_cut_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    whole, file = small_header(), tmp_path / "m.gguf"
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(RunFolderError, match="is not a whole model in GGUF: ") as refused:
            read_header(file, {8: MATRIX})
        assert "\n" not in str(refused.value)


def test_random_bytes_in_a_header_neither_hang_nor_raise_anything_else(tmp_path: Path) -> None:
    whole, file, draw = small_header(), tmp_path / "m.gguf", random.Random(0)
    num_refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            content[draw.randrange(4, len(content))] = draw.randrange(256)
        file.write_bytes(content)
        try:
            read_header(file, {8: MATRIX})
        except RunFolderError as error:
            num_refused += 1
            assert "\n" not in str(error)
    assert num_refused > 200


def test_names_of_files_in_gguf_are_no_ids_of_the_hub(tmp_path: Path) -> None:
    name = f"models/gemma.gguf@{'0' * 64}"
    assert not is_model_id("models/gemma.gguf") and not is_model_id(name)
    assert names_model("gemma.gguf") and names_model(name) and not names_model("gemma")
    with pytest.raises(RunFolderError, match=r"there is no file 'models/gemma\.gguf'; `hf download"):
        model_folder(name)
    for file in ("a.gguf", "b.gguf"):
        (tmp_path / file).write_bytes(small_header())
    with pytest.raises(RunFolderError, match=r"has 2 models in GGUF \(a\.gguf, b\.gguf\): name one of the files"):
        model_folder(str(tmp_path))


def test_without_the_package_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "agentgym.model.gguf.gguf_folder", raising=False)
    (tmp_path / "m.gguf").write_bytes(small_header())
    for name in (tmp_path / "m.gguf", tmp_path):
        with pytest.raises(RunFolderError, match=r"needs gguf, which is not installed: pip install .*\[gguf"):
            model_folder(str(name))
    arguments = ["--env", "TextGame-v0", "--model", str(tmp_path), "--output", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and not any((tmp_path / "cache").rglob("*.*"))


def write_gguf(file: Path, kind: str, change: Callable[[dict[str, Any]], None] = lambda parts: None) -> Path:
    """Writes a small random model of an architecture with the vocabulary and template of the embedded one.

    `change` may change the parts before they are written.
    """
    import gguf

    random_numbers = np.random.default_rng(0)
    tokenizer = json.loads((embedded_folder() / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {
        **tokenizer["model"]["vocab"],
        **{token["content"]: token["id"] for token in tokenizer["added_tokens"]},
    }
    special = {token["id"]: 3 if token["special"] else 4 for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    config = json.loads((embedded_folder() / "tokenizer_config.json").read_text(encoding="utf-8"))

    def matrix(rows: int, columns: int) -> Any:
        numbers = random_numbers.normal(0, 0.1, (rows, columns)).astype(np.float32)
        return gguf.quantize(numbers, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0

    def vector(size: int) -> Any:
        return random_numbers.normal(1, 0.1, size).astype(np.float32), None

    tensors = {"token_embd.weight": matrix(len(tokens), WIDTH), "output_norm.weight": vector(WIDTH)}
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        for name, rows, columns in (
            ("attn_q", HEADS * HEAD_WIDTH, WIDTH),
            ("attn_k", KV_HEADS * HEAD_WIDTH, WIDTH),
            ("attn_v", KV_HEADS * HEAD_WIDTH, WIDTH),
            ("attn_output", WIDTH, HEADS * HEAD_WIDTH),
            ("ffn_gate", FFN, WIDTH),
            ("ffn_up", FFN, WIDTH),
            ("ffn_down", WIDTH, FFN),
        ):
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
        norms = {"attn_norm": WIDTH, "ffn_norm": WIDTH}
        if kind == "gemma3":
            norms |= {"post_attention_norm": WIDTH, "post_ffw_norm": WIDTH}
            norms |= {"attn_q_norm": HEAD_WIDTH, "attn_k_norm": HEAD_WIDTH}
        tensors |= {f"{prefix}{name}.weight": vector(size) for name, size in norms.items()}
        if kind == "qwen2":
            biases = {"attn_q": HEADS * HEAD_WIDTH, "attn_k": KV_HEADS * HEAD_WIDTH, "attn_v": KV_HEADS * HEAD_WIDTH}
            tensors |= {f"{prefix}{name}.bias": vector(size) for name, size in biases.items()}
    parts: dict[str, Any] = {
        "kind": kind,
        "tensors": tensors,
        "tokenizer": "gpt2",
        "template": config["chat_template"],
        "scaling": None,
        "width": WIDTH,
        "layers": LAYERS,
    }
    change(parts)
    writer = gguf.GGUFWriter(file, parts["kind"])
    writer.add_context_length(512)
    writer.add_embedding_length(parts["width"])
    writer.add_block_count(parts["layers"])
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if parts["scaling"]:
        writer.add_rope_scaling_type(parts["scaling"])
    if kind == "gemma3":
        writer.add_sliding_window(64)
    if kind == "llama":
        writer.add_rope_dimension_count(HEAD_WIDTH)
        writer.add_vocab_size(len(tokens))
    if parts["tokenizer"]:
        writer.add_tokenizer_model(parts["tokenizer"])
        writer.add_token_list(tokens)
        writer.add_token_types([special.get(index, 1) for index in range(len(tokens))])
        writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
        writer.add_eos_token_id(vocabulary["<|im_end|>"])
        writer.add_bos_token_id(vocabulary["<|endoftext|>"])
        writer.add_chat_template(parts["template"])
    for name, (numbers, stored) in parts["tensors"].items():
        writer.add_tensor(name, numbers, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def logprobs_of(folder: Path, ids_T: torch.Tensor) -> torch.Tensor:
    """Our logprobs of the next tokens, `[T, V]`."""
    model = load_policy(folder)
    with torch.no_grad():
        return model.logits(model.hidden_states(ids_T, PackedLayout([len(ids_T)]))).log_softmax(-1)


@pytest.mark.adapter
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma3"])
def test_logprobs_and_ids_are_those_that_transformers_has_of_the_file(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(str(write_gguf(tmp_path / "small.gguf", kind)))
    assert folder.name == "small"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32)
    tokenizer = ChatTokenizer.load(folder)
    written = '<|im_start|>user\nGo on: {"a": [1]}<|im_end|>\n<think>'
    ids = tokenizer.encode(written)
    assert ids == AutoTokenizer.from_pretrained(tmp_path, gguf_file="small.gguf")(written)["input_ids"]
    assert tokenizer.decode(ids) == written
    ids_T = torch.tensor(ids)
    with torch.no_grad():
        theirs_TV = theirs(input_ids=ids_T[None]).logits[0].log_softmax(-1)
    assert (logprobs_of(folder, ids_T) - theirs_TV).abs().max() < 1e-5


@pytest.mark.adapter
def test_a_file_is_converted_once_and_what_is_beside_it_counts_in_its_place(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", "qwen2")
    first = model_folder(str(file))
    (first / "mark").touch()  # of this copy
    assert model_folder(str(tmp_path)) == first and (first / "mark").exists()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_folder() / name, tmp_path)
    second = model_folder(str(tmp_path))
    assert second != first
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (second / name).read_bytes() == (tmp_path / name).read_bytes()
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert not list(second.glob("*.gguf"))


@pytest.mark.adapter
def test_a_run_records_the_digest_of_its_file_and_goes_on_only_with_that_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "small.gguf", "qwen2")
    train = ["train", "--env", "TextGame-v0", "--model", str(file), *SMALL, "--output", str(tmp_path / "run")]
    assert main([*train, "--steps", "1"]) == 0
    name = f"{file}@{hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"] == name
    assert revised_name(name, tmp_path) == revised_name(str(tmp_path), tmp_path) == name
    assert main([*train, "--steps", "2", "--resume"]) == 0
    assert main(["verify", str(tmp_path / "run"), "--deep"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "tokenizer.json").is_file()
    played = ["--policy", str(file), "--num-tasks", "1", "--turn-tokens", "4", "--output", str(tmp_path / "scores")]
    assert main(["eval", "--env", "TextGame-v0", *played]) == 0
    assert yaml.safe_load((tmp_path / "scores" / "config.yaml").read_text())["tokenizer"] == name
    capsys.readouterr()
    with file.open("ab") as opened:
        opened.write(bytes(32))
    with pytest.raises(RunFolderError, match=r"small\.gguf' has changed: its SHA-256 was [0-9a-f]{64}, and is"):
        model_folder(name)


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda parts: parts["tensors"].pop(name)


def with_part(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda parts: parts.update({key: value})


def with_other_shape(parts: dict[str, Any]) -> None:
    parts["tensors"]["output_norm.weight"] = (np.ones(WIDTH // 2, dtype=np.float32), None)


def with_scaling(parts: dict[str, Any]) -> None:
    parts["tensors"]["rope_freqs.weight"] = (np.ones(HEAD_WIDTH // 2, dtype=np.float32), None)


@pytest.mark.adapter
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            with_part("kind", "martian"),
            r"does not load '.*m\.gguf' \(architecture martian, tokenizer gpt2\): .*martian",
        ),
        (with_part("tokenizer", "rwkv"), r"does not load '.*m\.gguf' \(architecture qwen2, tokenizer rwkv\): "),
        (with_part("tokenizer", ""), r"contains no tokenizer: put the model's tokenizer\.json beside the file"),
        (without("blk.1.ffn_up.weight"), r"lacks 1 tensors .*, the first is model\.layers\.1\.mlp\.up_proj"),
        (with_other_shape, r"lacks 1 tensors in the shapes of its model, the first is model\.norm\.weight"),
        (with_part("scaling", SimpleNamespace(value="linear")), r"scales .* \(qwen2\.rope\.scaling\.type\), which"),
        (with_part("width", 2**20), r"does not load .*: its settings are those of [\d,]+ weights, and it has [\d,]+"),
        (with_part("layers", 2**31), r"is not a whole model in GGUF: it has 2 layers, and names another number"),
        (with_scaling, r"scales its rotary embeddings \(rope_freqs\.weight\), which transformers does not read"),
    ],
)
def test_a_file_that_transformers_does_not_read_is_refused_and_leaves_nothing(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", "qwen2", change)
    with pytest.raises(RunFolderError, match=message) as refused:
        model_folder(str(file))
    assert "\n" not in str(refused.value)
    assert not list((cache / "agentgym" / "models").iterdir())


@pytest.mark.adapter
@pytest.mark.parametrize("number", [24, 99])
def test_an_unknown_quantization_is_refused_before_the_weights_are_read(
    number: int, tmp_path: Path, cache: Path
) -> None:
    file, name = write_gguf(tmp_path / "m.gguf", "qwen2"), text("token_embd.weight")
    content = file.read_bytes()
    offset = content.index(name) + len(name) + struct.calcsize("<IQQ")
    file.write_bytes(content[:offset] + struct.pack("<I", number) + content[offset + 4 :])
    with pytest.raises(RunFolderError, match=f"gguf does not dequantize: token_embd.weight has the type {number}"):
        model_folder(str(file))
    assert not list((cache / "agentgym" / "models").iterdir())


@pytest.mark.adapter
def test_a_file_that_was_not_copied_whole_is_refused_before_it_is_read(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "qwen2")
    file.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(RunFolderError, match=r"is not a whole model in GGUF: it lacks [\d,]+ bytes of its tensors"):
        model_folder(str(file))
    assert not list((cache / "agentgym" / "models").iterdir())
