"""The seeds for training, and those that are held out for evaluation."""

from __future__ import annotations

__all__ = ["EVAL_SEED_START"]

EVAL_SEED_START = 1_000_000_000
"""The first seed for evaluation: evaluation task number i has the seed `EVAL_SEED_START + i`; training seeds are below.
A task depends on nothing but its environment's id, keywords, options and seed, and a reset draws until the task is on
the side of its seed (`task_split.py`), so no training run meets an evaluation task. Rows of data, whose seeds are
digests below it, are kept apart by the text of their prompts."""
