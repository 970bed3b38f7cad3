"""A checkpoint is exported as a model folder whose logits are the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError, RunFolderError
from agentgym.model.decoder import Decoder
from agentgym.model.model_folder import load_decoder, published_views
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.checkpoints.checkpoint import LocalContent, Snapshot
from agentgym.trainers.checkpoints.export import export_model, find_checkpoint
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.checkpoints.writer import Checkpoints
from agentgym.trainers.settings.checkpoint import CheckpointConfig


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
        made = Snapshot(step=step, content=content, tokenizer=embedded_folder(), tasks={}, random={})
        checkpoints.save(made, metrics[:step])
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
        wanted = ours.logits(ours.hidden_states(ids_T, PackedLayout([len(ids)])))
        found = theirs(ids_T[None]).logits[0]
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
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
    one = run / "checkpoints" / "step-000001"
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7; there are those of 1, 2, 3"):
        find_checkpoint(run, step=7)
    with pytest.raises(ConfigError, match="give one of them"):
        find_checkpoint(run, step=1, best=True)
    with pytest.raises(ConfigError, match="is a checkpoint already"):
        find_checkpoint(one, best=True)
    with pytest.raises(RunFolderError, match="there is no folder"):
        find_checkpoint(tmp_path / "rnu")
    with pytest.raises(RunFolderError, match="is a model folder already"):
        find_checkpoint(embedded_folder())
    with pytest.raises(RunFolderError, match="holds no run"):
        find_checkpoint(tmp_path)
    with pytest.raises(RunFolderError, match="taken already"):
        export_model(find_checkpoint(one), run)
    (one / "state.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"no whole checkpoint: state.json has 1 bytes"):
        find_checkpoint(one)
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
