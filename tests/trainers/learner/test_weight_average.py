"""The moving average of the weights: its formula, its state, and its export."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.trainers.learner.optimizer import PolicyOptimizer
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

Tiny = Callable[..., Decoder]
STEP = OptimizerConfig(learning_rate=0.01, warmup_steps=1)
SMALL = "train --env TextGame-v0 --env-kwargs level=1 --tasks 2 --group-size 3 --eval.episodes 0 --limits.max-turns 4"


def take_step(model: Decoder, optimizer: PolicyOptimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_it_retains_its_share_at_each_step_and_changes_no_weight(tiny: Tiny) -> None:
    model, plain = tiny(), tiny()
    optimizer, plain_optimizer = PolicyOptimizer(model, STEP, 10, ema_decay=0.75), PolicyOptimizer(plain, STEP, 10)
    mean = model.embed.detach().clone()
    for seed in range(3):
        take_step(model, optimizer, seed)
        take_step(plain, plain_optimizer, seed)
        mean = 0.75 * mean + 0.25 * model.embed.detach()
    torch.testing.assert_close(optimizer.state_dict()["average"]["embed"], mean)
    assert "average" not in plain_optimizer.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_leaves_it_as_it_is(tiny: Tiny) -> None:
    model = tiny()
    optimizer = PolicyOptimizer(model, STEP, 10, ema_decay=0.5)
    take_step(model, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict()["average"])
    model.embed.grad = torch.full_like(model.embed, torch.nan)
    optimizer.step()
    assert all(torch.equal(before[name], mean) for name, mean in optimizer.state_dict()["average"].items())


def test_half_precision_weights_have_an_average_in_float32(tiny: Tiny) -> None:
    model = tiny().to(torch.bfloat16)
    optimizer = PolicyOptimizer(model, OptimizerConfig(learning_rate=1e-6, warmup_steps=1), 10, ema_decay=0.5)
    first = model.embed.detach().float().clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    optimizer.step()
    mean = optimizer.state_dict()["average"]["embed"]
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, first - 0.5e-6, rtol=0, atol=1e-8)


def test_a_resumed_average_goes_on_bitwise(tiny: Tiny) -> None:
    whole = tiny()
    optimizer = PolicyOptimizer(whole, STEP, 10, ema_decay=0.9)
    take_step(whole, optimizer, 0)
    resumed = copy.deepcopy(whole)
    second_optimizer = PolicyOptimizer(resumed, STEP, 10, ema_decay=0.9)
    second_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, its in ((whole, optimizer), (resumed, second_optimizer)):
        take_step(model, its, 1)
    means, theirs = (its.state_dict()["average"] for its in (optimizer, second_optimizer))
    assert all(torch.equal(mean, theirs[name]) for name, mean in means.items())


@pytest.mark.parametrize("decay", [0.0, 1.0, 1.5])
def test_a_share_that_averages_nothing_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match="ema_decay is above 0 and below 1"):
        LearnerConfig(ema_decay=decay)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_a_run_exports_it_and_a_resumed_one_the_same(
    tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, cut = str(tmp_path / "run"), str(tmp_path / "cut")
    words = [*SMALL.split(), "--learner.ema-decay", "0.5", "--model-backend", backend]
    words += ["--target-success", "None", "--checkpoint.every", "1"]
    assert main([*words, "--steps", "2", "--output", run]) == 0
    assert main([*words, "--steps", "1", "--output", cut]) == 0
    assert main(["train", "--resume", "--output", cut, "--steps", "2"]) == 0
    exports = []
    for folder in (run, cut):
        assert main(["export", folder, f"{folder}-ema", "--ema"]) == 0
        assert f"average of the model of step 2 (float32): {folder}-ema" in capsys.readouterr().out
        exports.append(load_file(Path(f"{folder}-ema") / "model.safetensors"))
    after = [load_file(embedded_folder() / "model.safetensors"), weights(Path(run), 1), weights(Path(run), 2)]
    for name, exported in exports[0].items():
        mean = before = after[0][name].float()
        for tensors in after[1:]:
            if not torch.equal(tensors[name], before):  # a step whose groups are all alike has no update
                mean, before = 0.5 * mean + 0.5 * tensors[name], tensors[name]
        torch.testing.assert_close(exported, mean, rtol=0, atol=1e-7)
        assert torch.equal(exported, exports[1][name])
    assert main(["export", run, str(tmp_path / "none"), "--ema", "--adapter"]) == 2
    assert "has no adapter" in capsys.readouterr().err


@pytest.mark.long
def test_the_average_of_an_adapter_is_exported_as_one(
    tmp_path: Path, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "out"
    words = [*SMALL.split(), "--learner.ema-decay", "0.5", "--learner.lora.rank", "2", "--steps", "1"]
    assert main([*words, "--output", run]) == 0
    assert main(["export", run, str(tmp_path / "now"), "--adapter"]) == 0
    assert main(["export", run, str(out), "--adapter", "--ema"]) == 0
    now, mean = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "now", out))
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path / "now", out)]
    assert configs[0] == configs[1] and mean.keys() == now.keys()
    name = next(name for name in now if name.endswith("lora_B.weight") and now[name].any())
    torch.testing.assert_close(mean[name], 0.5 * now[name])  # which began at 0
    capsys.readouterr()
    assert main(["export", run, str(tmp_path / "none"), "--ema"]) == 2
    assert "the average of a run with learner.lora is one of its adapter: add --adapter" in capsys.readouterr().err
    assert main(["export", str(finished_run), str(tmp_path / "none"), "--ema"]) == 2
    assert "has no average of the weights: leave --ema out, or train with learner.ema_decay" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def weights(run: Path, step: int) -> dict[str, Any]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
