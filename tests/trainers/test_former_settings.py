"""Settings of earlier versions are read under today's names, with a line on each that changes something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.former_settings import FORMER_SETTINGS, with_current_names
from agentgym.trainers.settings.sampling import UNCUT
from agentgym.trainers.tasks.practice import CurriculumConfig

GONE = sorted(name for name, former in FORMER_SETTINGS.items() if not former.name)


def nested(name: str, value: object) -> dict[str, Any]:
    """Returns `{"a": {"b": value}}` for `a.b`."""
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def read(settings: Mapping[str, Any]) -> tuple[TrainConfig, list[str]]:
    """Returns a file's settings as they are read today, and the lines on former ones."""
    notes: list[str] = []
    return config_from_mapping(TrainConfig, {"env": "X", **with_current_names(settings, notes.append)}), notes


@pytest.mark.parametrize("name", FORMER_SETTINGS)
def test_a_former_setting_with_its_default_changes_nothing(name: str) -> None:
    assert read(nested(name, FORMER_SETTINGS[name].default)) == (TrainConfig(env="X"), [])


@pytest.mark.parametrize("name", GONE)
def test_a_setting_that_is_gone_is_left_out_with_its_reason(name: str) -> None:
    settings = nested(name, "other")
    config, notes = read(settings)
    assert config == TrainConfig(env="X") and settings == nested(name, "other")
    assert notes == [f"the setting {name} is left out: {FORMER_SETTINGS[name].why}"]


def test_a_former_setting_of_another_name_is_read_with_a_line() -> None:
    curriculum = {"method": "steps", "values": [1, 2], "window": 4, "raise_at": 0.8}
    config, (note,) = read({"practice": {"curriculum": curriculum}})
    assert config.practice.curriculum == CurriculumConfig(method="steps", values=(1, 2), settings={"window": 4})
    assert note.startswith("the setting practice.curriculum.window is called practice.curriculum.settings.window now")


@pytest.mark.parametrize(
    ("executor", "dtype", "passes", "now"),
    [
        ("ray", "auto", "bfloat16", "bfloat16"),
        ("ray", "auto", "float32", "float32"),
        ("ray", "float32", "bfloat16", "bfloat16"),
        ("ray", "auto", None, "auto"),
        ("local", "auto", "bfloat16", "auto"),
        ("local", "bfloat16", "float32", "bfloat16"),
        ("local", "float32", None, "float32"),
    ],
)
def test_a_run_keeps_the_type_that_it_computed_in(executor: str, dtype: str, passes: str | None, now: str) -> None:
    learner = {"dtype": dtype, "fsdp": {"param_dtype": passes}}
    config, notes = read({"executor": executor, "learner": learner})
    assert config.learner.dtype == now and len(notes) == (passes is not None)


def test_two_former_settings_become_the_numbers_of_one() -> None:
    config, notes = read({"optimizer": {"beta2": 0.999}, "reward": {"judge": {"lowest": 1, "highest": 5}}})
    assert (config.optimizer.betas, config.reward.judge.scale) == ((0.9, 0.999), (1, 5)) and len(notes) == 3


def test_an_option_that_is_gone_is_refused_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--env", "TextGame-v0", "--sampling.top-p", "0.9"]) == 2
    assert f"unknown option '--sampling.top-p': {UNCUT}" in capsys.readouterr().err
