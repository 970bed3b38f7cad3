"""The optimizer and rate of a run that sets none: those of its model's size, recorded, and kept when it is resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentgym.embedded import embedded_folder
from agentgym.errors import RunFolderError
from agentgym.model.model_folder import count_parameters, load_decoder
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.optimizer import PolicyOptimizer
from agentgym.trainers.loop.dry_run import describe_plan
from agentgym.trainers.settings import optimizer as settings
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.optimizer import BIG, OptimizerConfig

Train = Callable[..., Any]


@pytest.mark.parametrize(
    ("settings", "size", "expected"),
    [
        ({}, BIG - 1, ("adamw", 4e-4)),
        ({}, BIG, ("adamw", 1e-6)),
        ({"name": "muon"}, BIG, ("muon", 1e-6)),
        ({"learning_rate": 3e-5}, BIG, ("adamw", 3e-5)),
    ],
)
def test_what_is_not_given_goes_by_the_size_of_the_model(
    settings: dict[str, Any], size: int, expected: tuple[str, float]
) -> None:
    optimizer = OptimizerConfig(**settings).for_size(size)
    assert (optimizer.name, optimizer.peak_rate) == expected


def test_the_parameters_of_a_folder_are_counted_without_reading_them(tmp_path: Path) -> None:
    model = load_decoder(embedded_folder())
    assert count_parameters(embedded_folder()) == sum(parameter.numel() for parameter in model.parameters())
    assert PolicyOptimizer(model, OptimizerConfig(warmup_steps=0), 1).learning_rate == 4e-4
    assert count_parameters(tmp_path) == 0
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(2000))
    assert count_parameters(tmp_path) == 1000


@pytest.mark.long
def test_a_run_records_the_rate_of_its_model_and_keeps_it(
    small_run: TrainConfig, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "BIG", 1000)
    plain = OptimizerConfig(warmup_steps=0)
    config = replace(small_run, steps=1, tasks=1, group_size=2, eval=HeldOutConfig(episodes=0), optimizer=plain)
    assert any("by adamw at a rate of 1e-06" in remark for _, _, remark in describe_plan(config))
    train(config, tmp_path / "run")
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["optimizer"]
    assert (recorded["name"], recorded["learning_rate"]) == ("adamw", 1e-6)
    monkeypatch.undo()
    result, _ = train(replace(config, steps=2), tmp_path / "run", resume=True)
    assert result.steps == 2
    new_config = replace(config, steps=3, optimizer=replace(plain, learning_rate=1e-5))
    with pytest.raises(RunFolderError, match=r"optimizer\.learning_rate: 1e-06 there, 1e-05 here"):
        train(new_config, tmp_path / "run", resume=True)
