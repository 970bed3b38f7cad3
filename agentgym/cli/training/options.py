"""The options of `agentgym train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.trainers.config import TrainConfig

__all__ = ["MAIN_SETTINGS", "TrainOptions"]

MAIN_SETTINGS = tuple(
    "env env_kwargs model algo steps tasks group_size optimizer.learning_rate limits.turn_tokens seed eval.episodes "
    "target_success agent.name engine executor learner.device learner.lora.rank output resume config print_config "
    "dry_run json".split()
)
"""The settings that `--help` shows, and the options of the command itself."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Trains a model on an environment: plays groups of episodes, credits them, and takes optimizer steps."""

    run: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config: Path | None = None
    """A YAML file with settings; options on the command line win."""
    output: Path | None = None
    """The folder of the run; by default a new one under runs/."""
    resume: bool = False
    """Resume the run in --output from its newest checkpoint; without --env and --data, with the run's own settings."""
    print_config: bool = False
    """Show every setting, as YAML that --config takes, and stop."""
    dry_run: bool = False
    """Show what the run would do and need, and stop."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""
