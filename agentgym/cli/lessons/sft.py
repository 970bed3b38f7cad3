"""`agentgym sft`: trains a model to imitate recorded replies, and leaves it as a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from agentgym.cli.lessons.lesson import LessonOptions, read_lesson
from agentgym.trainers.lessons.config import SftConfig

__all__ = ["SftOptions", "main"]


@dataclass(frozen=True, kw_only=True)
class SftOptions(LessonOptions):
    """Trains a model to imitate replies: of a policy that plays, of conversations in files, or of recorded episodes.

    Name one of --env, --conversations and --episodes."""

    run: Annotated[SftConfig, tyro.conf.arg(name="")]


def main(args: Sequence[str]) -> int:
    """Runs `agentgym sft ...`."""
    options = read_lesson(SftOptions, SftConfig, args, ("env", "env_kwargs", "policy", "mistakes", "conversations"))
    from agentgym.cli.lessons.running import run_lesson  # here: help and mistakes need no torch

    return run_lesson(options)
