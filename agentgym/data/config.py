"""The settings of the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from agentgym.errors import ConfigError, MissingSetting, UnknownName, nearest
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least

__all__ = ["COLUMNS", "DataConfig", "env_of_data"]

TOOL_PROMPT = "ToolPrompt-v0"
"""The environment that plays rows with `tools`."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "messages", "question"),
    "ground_truth": ("reward_model.ground_truth", "ground_truth", "answer"),
    "data_source": ("data_source",),
    "extra_info": ("extra_info",),
    "agent_name": ("agent_name",),
    "tools": ("tools",),
}
"""The parts of a row, each with the columns that it is read from, unless `columns` overrides them: the first column
that exists counts. `a.b` is the key b of the mappings in column a."""


@config_class
class DataConfig:
    """The files of tasks, and the steps between reading and playing them.

    A file is .parquet, .jsonl or .json (both also .gz), a pattern such as 'data/*.parquet', either at an address too
    (s3://bucket/train.parquet), a folder or name of the `datasets` library (NAME:SPLIT or NAME:CONFIG:SPLIT), or
    path/to/file.py:generator.
    """

    train: tuple[str, ...] | str = ()
    """Files of the tasks to train on."""
    eval: tuple[str, ...] | str = ()
    """Files of the held-out tasks."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The columns of a row's parts, such as prompt=problem ground_truth=reward.answer; verl's columns, and question
    and answer, need no setting. Parts: prompt, ground_truth, data_source, extra_info, agent_name,
    tools (the names of those that a row is shown)."""
    keep: tuple[str, ...] = ()
    """Further columns that go into extra_info, for a reward function to read."""
    agents: Mapping[str, str] = field(default_factory=dict)
    """The environment that plays the rows of an agent_name, such as tool_agent=tools.py:Search."""
    tools: tuple[str, ...] = ()
    """Tools for the rows (`--tools` for short), which ToolPrompt-v0 then plays: path/to/file.py:function, a registered
    name, a file of schemas (.json) or of verl's tools (.yaml), mcp:COMMAND, mcp:URL, openapi:DOCUMENT@URL (or
    openapi:DOCUMENT@URL#NAME,NAME for some of its operations)."""
    max_prompt_tokens: int | None = None
    """Rows with a longer prompt are left out and reported; None keeps all."""
    max_rows: int | None = None
    """The rows to read from each file, from its beginning; None reads all."""
    eval_fraction: float = 0.0
    """Holds out this share of the prompts in train, in place of files to evaluate on."""
    overlap: Literal["refuse", "drop-train", "drop-eval"] = "refuse"
    """The treatment of prompts that train and eval share: refuse them, or drop them from one side."""
    shuffle: bool = True
    """True gives each epoch its own order; otherwise the tasks come in the order of the files."""

    def __post_init__(self) -> None:
        for part in self.columns:
            if part not in COLUMNS:
                near = nearest(part, COLUMNS) or "."
                raise UnknownName(f"unknown part {part!r} of a row in columns{near} Parts: {', '.join(COLUMNS)}")
        for setting, names in (("columns", self.columns), ("agents", self.agents)):
            for key, value in names.items():
                if not isinstance(value, str):  # a command line reads 0 and true as JSON
                    raise ConfigError(f"{setting} {key} is a name, got {value!r}")
        check_at_least(1, self, "max_prompt_tokens", "max_rows")
        if not 0.0 <= self.eval_fraction < 1.0:
            raise ConfigError(f"eval_fraction is a share from 0 to below 1, got {self.eval_fraction}")
        if self.eval_fraction and self.eval:
            raise ConfigError("eval names the held-out tasks, and so does eval_fraction: give one of them")
        if self.eval_fraction and not self.train:
            raise ConfigError("eval_fraction holds tasks of train out, and train names none")

    @property
    def has_files(self) -> bool:
        """True if any files are named."""
        return bool(self.train or self.eval)

    @property
    def train_files(self) -> tuple[str, ...]:
        """`train` as a tuple, however it was written."""
        return (self.train,) if isinstance(self.train, str) else tuple(self.train)

    @property
    def eval_files(self) -> tuple[str, ...]:
        """`eval` as a tuple, however it was written."""
        return (self.eval,) if isinstance(self.eval, str) else tuple(self.eval)


def env_of_data(data: DataConfig, env: str, env_kwargs: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """Returns the environment of a run and its keywords: those given, or one that plays rows, with their tools.

    Raises ConfigError for a run that names neither an environment nor data, and for tools beside an environment that
    has its own.
    """
    if data.tools:
        if env not in ("", TOOL_PROMPT):
            raise ConfigError(
                f"data.tools are for {TOOL_PROMPT}, and env is {env}: an environment has tools of its own"
            )
        return TOOL_PROMPT, {**env_kwargs, "tools": [*data.tools]}
    if env:
        return env, env_kwargs
    if not data.has_files:
        raise MissingSetting(
            "missing env: name an environment (`agentgym env list` shows them), or files with tasks, which"
            " Prompt-v0 plays: data.train to train on, data.eval to evaluate on"
        )
    return "Prompt-v0", env_kwargs
