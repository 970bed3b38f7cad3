"""`agentgym dpo`: trains a model on pairs of a better and a worse reply, and leaves it as a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from agentgym.cli.lessons.lesson import LessonOptions, read_lesson
from agentgym.trainers.lessons.config import DpoConfig

__all__ = ["DpoOptions", "main"]


@dataclass(frozen=True, kw_only=True)
class DpoOptions(LessonOptions):
    """Trains a model to prefer better replies over worse ones to the same prompts (direct preference optimization).

    Name --pairs or --episodes."""

    run: Annotated[DpoConfig, tyro.conf.arg(name="")]


def main(args: Sequence[str]) -> int:
    """Runs `agentgym dpo ...`."""
    options = read_lesson(DpoOptions, DpoConfig, args, ("pairs", "pairs_per_task", "loss", "beta", "sft_weight"))
    from agentgym.cli.lessons.running import run_lesson  # here: help and mistakes need no torch

    return run_lesson(options)
