"""The settings of data, as a command line and a YAML file give them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from agentgym.cli.options import parse_options
from agentgym.data import DataConfig
from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_from_mapping


@dataclass(frozen=True, kw_only=True)
class Options:
    """A command with data."""

    data: DataConfig = field(default_factory=DataConfig)


def parsed(*words: str) -> DataConfig:
    return parse_options(Options, words, prog="agentgym train").data


def test_the_command_line_takes_one_file_or_many() -> None:
    assert parsed().train_files == () == parsed().eval_files
    assert parsed("--data.train", "a.parquet").train_files == ("a.parquet",)
    many = parsed("--data.train", "a.parquet", "b.jsonl", "--data.eval", "c.json", "--data.no-shuffle")
    assert (many.train_files, many.eval_files, many.shuffle) == (("a.parquet", "b.jsonl"), ("c.json",), False)


def test_the_command_line_takes_every_setting() -> None:
    words = (
        "--data.train rows.py:rows --data.columns prompt=question ground_truth=label --data.keep level --data.agents"
        " tool_agent=tools.py:Search --data.max-prompt-tokens 512 --data.max-rows 100 --data.eval-fraction 0.1"
        " --data.overlap drop-train"
    )
    expected = DataConfig(
        train=parsed("--data.train", "rows.py:rows").train,
        columns={"prompt": "question", "ground_truth": "label"},
        keep=("level",),
        agents={"tool_agent": "tools.py:Search"},
        max_prompt_tokens=512,
        max_rows=100,
        eval_fraction=0.1,
        overlap="drop-train",
    )
    assert parsed(*words.split()) == expected
    with pytest.raises(ConfigError, match="eval_fraction is a share"):
        parsed("--data.train", "a.jsonl", "--data.eval-fraction", "2")
    with pytest.raises(ConfigError, match="columns prompt is a name, got 0"):
        parsed("--data.train", "a.jsonl", "--data.columns", "prompt=0")


def test_a_file_of_settings_takes_one_file_or_many() -> None:
    config = config_from_mapping(DataConfig, {"train": "a.parquet", "columns": {"prompt": "question"}})
    assert (config.train_files, config.columns) == (("a.parquet",), {"prompt": "question"})
    assert config_from_mapping(DataConfig, {"train": ["a.parquet", "b.parquet"]}).train_files == (
        "a.parquet",
        "b.parquet",
    )
    with pytest.raises(ConfigError, match="setting 'overlap' is"):
        config_from_mapping(DataConfig, {"overlap": "drop"})
