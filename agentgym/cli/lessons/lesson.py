"""The run of `agentgym sft` and `agentgym dpo`: its options, its display and its report."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from agentgym.cli.options import parse_options, path_after, read_mapping, text_after
from agentgym.cli.run_folder import resumed_config
from agentgym.cli.train import refuse_torchrun
from agentgym.errors import RunFolderError
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.former_settings import OF_BLOCK, with_current_lesson_names
from agentgym.trainers.lessons.config import LessonConfig

__all__ = ["MAIN_SETTINGS", "LessonOptions", "read_lesson"]

logger = logging.getLogger(__name__)

Options = TypeVar("Options", bound="LessonOptions")
MAIN_SETTINGS = (
    *("episodes", "validation", "model", "steps", "epochs", "batch_size", "optimizer.learning_rate", "seed"),
    *("learner.device", "learner.lora.rank", "executor", "eval.episodes", "eval.every", "trackers"),
    *("output", "resume", "config", "json"),
)
"""The settings of both commands that `--help` shows, and the options of the commands themselves."""
SHORT = {name.replace("_", "-"): block for block, names in OF_BLOCK.items() for name in names}
"""The block of each option that needs none."""


@dataclass(frozen=True, kw_only=True)
class LessonOptions:
    """The options of a command that learns from recorded text."""

    run: Annotated[LessonConfig, tyro.conf.arg(name="")]
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A YAML file with settings; options on the command line win."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The folder of the run, in which the model is left; by default a new one under runs/."""
    resume: bool = False
    """Go on in the folder of --output, with its settings, after its newest checkpoint."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def read_lesson(
    kind: type[Options], config: type[LessonConfig], args: Sequence[str], main_options: Sequence[str]
) -> Options:
    """Reads the options of the command of a kind of settings; `--help` shows its `main_options`.

    Raises ConfigError, UnknownName or RunFolderError for what cannot be read, or not be resumed.
    """
    command = config.algo
    refuse_torchrun(command)
    args = [_full_name(arg) for arg in args]
    default = _defaults(kind, config, args)
    options = parse_options(
        kind, args, prog=f"agentgym {command}", default=default, main_options=(*main_options, *MAIN_SETTINGS)
    )
    run = options.run
    for path in map(Path, (*run.episodes, *(run.validation if run.episodes else ()))):
        if not path.exists():
            hint = f"; for so many rows a step, --batch-size {path}" if path.name.isdigit() else ""
            raise RunFolderError(f"there is no run folder {str(path)!r}{hint}")
    return options


def _full_name(arg: str) -> str:
    """Returns an option with its block, which the most used ones need not have: `--device` is `--learner.device`."""
    match = re.match(r"--(?:no-)?([\w-]+)", arg)
    block = SHORT.get(match[1].replace("_", "-")) if match else None
    return f"--{block}.{arg[2:]}" if block else arg


def _defaults(kind: type[Options], config: type[LessonConfig], args: Sequence[str]) -> Options | None:
    """Returns the options of the file after `--config`, or of the run that is resumed; None without either."""
    path = path_after("--config", args)
    resumed = resumed_config(args)
    if path is not None:
        settings = with_current_lesson_names(read_mapping(path), logger.warning)
    elif resumed is not None:
        from agentgym.trainers.checkpoints.run_folder import read_settings  # here: it needs torch

        settings = read_settings(resumed.parent)
    else:
        return None
    if not any(settings.get(name) for name in config.sources):
        sources = {name: text for name in config.sources if (text := text_after(f"--{name}", args))}
        settings |= {name: text if name == "env" else (text,) for name, text in sources.items()}
    return kind(run=config_from_mapping(config, settings), config=path)
