"""A checkpoint is exported as a model folder whose logits are the trainer's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentgym.chat_templates import ChatTokenizer, renderer_for
from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError, RunFolderError
from agentgym.model.decoder import Decoder
from agentgym.model.model_folder import load_decoder, published_views, save_model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.checkpoints.checkpoint import LocalContent, Snapshot, copy_tokenizer
from agentgym.trainers.checkpoints.export import DType, export_model, find_checkpoint
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.checkpoints.writer import Checkpoints
from agentgym.trainers.learner.lora import Adapters
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.lora import LoraConfig


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Callable[[int], Decoder]]:
    """A run with checkpoints of steps 1, 2 and 3, the second the best, and the model of each step."""

    def model_of(step: int) -> Decoder:
        model = load_decoder(embedded_folder())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + step / 100)
        return model

    run = tmp_path / "run"
    checkpoints = Checkpoints(run, CheckpointConfig())
    metrics = [{"step": step, "success": float(step == 2)} for step in (1, 2, 3)]
    for step in (1, 2, 3):
        model = model_of(step)
        content = LocalContent.of(model, published_views(model), {}, CopyMemory())
        snapshot = Snapshot(step=step, content=content, tokenizer=embedded_folder(), tasks={}, random={})
        checkpoints.save(snapshot, metrics[:step])
    checkpoints.close()
    (run / "config.yaml").write_text("algo: grpo\n")
    (run / "checkpoints" / "best").write_text("step-000002\n")
    return run, model_of


@pytest.mark.parametrize(("choice", "step"), [({}, 3), ({"best": True}, 2), ({"step": 1}, 1)])
def test_the_logits_of_the_exported_model_are_the_trainers(
    choice: dict[str, int], step: int, trained: tuple[Path, Callable[[int], Decoder]], tmp_path: Path
) -> None:
    run, model_of = trained
    written = export_model(find_checkpoint(run, **choice), tmp_path / "out")  # type: ignore[arg-type]
    assert written.step == step and written.folder == tmp_path / "out"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out").encode("open the door and take the lamp")
    ours = model_of(step)
    ids_T = torch.tensor(ids)
    with torch.no_grad():
        expected = ours.logits(ours.hidden_states(ids_T, PackedLayout([len(ids)])))
        logits = theirs(ids_T[None]).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert not (tmp_path / "out" / "learner").exists() and not (tmp_path / "out" / "state.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_another_dtype_is_in_the_files_and_in_the_config(
    trained: tuple[Path, Callable[[int], Decoder]], tmp_path: Path
) -> None:
    run, model_of = trained
    export_model(find_checkpoint(run / "checkpoints" / "step-000003"), tmp_path / "out", dtype="bfloat16")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.model.embed_tokens.weight, model_of(3).embed.to(torch.bfloat16))


def test_what_cannot_be_exported_is_named(trained: tuple[Path, Callable[[int], Decoder]], tmp_path: Path) -> None:
    run, _ = trained
    checkpoint = run / "checkpoints" / "step-000001"
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7; there are those of 1, 2, 3"):
        find_checkpoint(run, step=7)
    with pytest.raises(ConfigError, match="give one of them"):
        find_checkpoint(run, step=1, best=True)
    with pytest.raises(ConfigError, match="is a checkpoint already"):
        find_checkpoint(checkpoint, best=True)
    with pytest.raises(RunFolderError, match="there is no folder"):
        find_checkpoint(tmp_path / "rnu")
    with pytest.raises(RunFolderError, match="is a model folder already"):
        find_checkpoint(embedded_folder())
    with pytest.raises(RunFolderError, match="holds no run"):
        find_checkpoint(tmp_path)
    with pytest.raises(RunFolderError, match="taken already"):
        export_model(find_checkpoint(checkpoint), run)
    (checkpoint / "state.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"not a whole checkpoint: state.json has 1 bytes"):
        find_checkpoint(checkpoint)
    (run / "checkpoints" / "best").unlink()
    with pytest.raises(ConfigError, match="names no best checkpoint"):
        find_checkpoint(run, best=True)
    assert find_checkpoint(run / "checkpoints").step == 3, "the folder of the checkpoints is that of the run"


def test_a_run_whose_newest_checkpoint_is_torn_exports_the_one_before(
    trained: tuple[Path, Callable[[int], Decoder]], caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = trained
    (run / "checkpoints" / "step-000003" / "model.safetensors").write_bytes(b"")
    assert find_checkpoint(run).step == 2
    assert "model.safetensors has 0 bytes" in caplog.text and "The one before is taken, step 2" in caplog.text


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def base_folder(folder: Path, template: str = PLAIN) -> Path:
    """A base model whose replies end at `<|endoftext|>` (0), with a template that ends them at `<|im_end|>` (2)."""
    ignored = shutil.ignore_patterns("__pycache__", "*.py", "generation_config.json")
    shutil.copytree(embedded_folder(), folder, ignore=ignored)
    for name, change in {
        "config.json": {"eos_token_id": 0, "pad_token_id": 0},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>", "chat_template": None},
        "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
    }.items():
        settings = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**settings, **change}))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(template + "{# tools #}")
    return folder


def test_a_saved_model_ends_its_replies_where_the_template_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    source = base_folder(tmp_path / "source")
    renderer = renderer_for(source)
    assert renderer.stop_ids == (2, 0)
    content = LocalContent.of(model := load_decoder(source), published_views(model), {}, CopyMemory())
    checkpoints = Checkpoints(tmp_path / "run", CheckpointConfig())
    snapshot = Snapshot(step=1, content=content, tokenizer=source, renderer=renderer, tasks={}, random={})
    checkpoints.save(snapshot, [{"step": 1}])
    checkpoints.close()
    checkpoint = find_checkpoint(tmp_path / "run")
    for folder in (checkpoint.path, export_model(checkpoint, tmp_path / "out").folder):
        generation = GenerationConfig.from_pretrained(folder)
        assert generation.eos_token_id == [2, 0] and generation.pad_token_id in (None, 0)
        assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"
        assert renderer_for(folder).stop_ids == (2, 0)
        assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == PLAIN + "{# tools #}"
        assert ChatTokenizer.load(folder).tool_template == PLAIN + "{# tools #}"


def test_an_export_of_a_checkpoint_without_the_templates_end_has_it(tmp_path: Path) -> None:
    source = base_folder(tmp_path / "source")
    content = LocalContent.of(model := load_decoder(source), published_views(model), {}, CopyMemory())
    checkpoints = Checkpoints(tmp_path / "run", CheckpointConfig())
    checkpoints.save(Snapshot(step=1, content=content, tokenizer=source, tasks={}, random={}), [{"step": 1}])
    checkpoints.close()
    written = export_model(find_checkpoint(tmp_path / "run"), tmp_path / "out").folder
    assert json.loads((written / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_a_tokenizers_end_token_stays_where_a_template_writes_it(tmp_path: Path) -> None:
    source = base_folder(tmp_path / "source", PLAIN.replace("{% if", "{{ '' if eos_token else '' }}{% if", 1))
    (out := tmp_path / "out").mkdir()
    copy_tokenizer(source, out, renderer_for(source))
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


def test_files_that_end_replies_where_the_template_does_are_copied_as_they_are(tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    copy_tokenizer(embedded_folder(), out, renderer_for(embedded_folder()))
    for file in out.iterdir():
        assert file.read_bytes() == (embedded_folder() / file.name).read_bytes()


@pytest.fixture
def adapted_run(tmp_path: Path) -> tuple[Path, Adapters]:
    """A run in bfloat16 whose adapters add less than the last bit of most weights, and its adapters."""
    base = tmp_path / "base"
    save_model_folder(load_decoder(embedded_folder()), base, dtype=torch.bfloat16)
    copy_tokenizer(embedded_folder(), base)
    model = load_decoder(base, dtype=torch.bfloat16)
    adapters = Adapters.of(model, None, LoraConfig(rank=4, seed=0))
    with torch.no_grad():
        for name, own in model.named_parameters():
            if name.endswith("B_OR"):
                own.copy_(torch.randn(own.shape, generator=torch.Generator().manual_seed(1)) * 1e-5)
    weights = adapters.merged_weights(adapted_only=False)
    content = LocalContent.of(model, weights, {"lora": adapters.state_dict()}, CopyMemory())
    checkpoints = Checkpoints(tmp_path / "run", CheckpointConfig())
    checkpoints.save(Snapshot(step=1, content=content, tokenizer=base, tasks={}, random={}), [{"step": 1}])
    checkpoints.close()
    (tmp_path / "run" / "config.yaml").write_text(f"algo: grpo\nmodel: {base}\n")
    return tmp_path / "run", adapters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_adapters_are_merged_in_float32_and_rounded_once(
    dtype: DType, adapted_run: tuple[Path, Adapters], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, adapters = adapted_run
    written = export_model(find_checkpoint(run), tmp_path / "out", dtype=dtype)
    tensors, state = load_file(written.folder / "model.safetensors"), adapters.state_dict()["tensors"]
    base = load_file(tmp_path / "base" / "model.safetensors")
    rounded = load_file(find_checkpoint(run).path / "model.safetensors")
    assert not caplog.records
    for stem in ("model.layers.0.self_attn.q_proj", "model.layers.3.mlp.down_proj"):
        low, high = (state[f"base_model.model.{stem}.lora_{side}.weight"].float() for side in "AB")
        name = f"{stem}.weight"
        expected = base[name].float() + high @ low * 8.0
        torch.testing.assert_close(tensors[name], expected.to(tensors[name].dtype), rtol=0, atol=1e-9)
        assert (rounded[name].float() - expected).norm() > 0.5 * (expected - base[name].float()).norm()


@pytest.mark.parametrize("change", ["gone", "final_norm", "layers.1.down"])
def test_without_the_base_the_rounded_weights_are_exported_with_a_warning(
    change: str, adapted_run: tuple[Path, Adapters], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = adapted_run
    if change == "gone":
        shutil.rmtree(tmp_path / "base")
    else:
        base = load_decoder(tmp_path / "base")
        with torch.no_grad():
            base.get_parameter(change).mul_(1.01)
        save_model_folder(base, tmp_path / "base", dtype=torch.bfloat16)
    written = export_model(find_checkpoint(run), tmp_path / "out", dtype="bfloat16")
    tensors = load_file(written.folder / "model.safetensors")
    expected = load_file(find_checkpoint(run).path / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    (record,) = caplog.records
    assert "the weights are those of the checkpoint, rounded to bfloat16: " in record.message
