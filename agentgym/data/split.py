"""Splits rows into train and eval without a prompt on both sides, by a digest of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from agentgym.data.rows import Placed
from agentgym.errors import ConfigError

__all__ = ["hold_out", "keep_apart"]

NUM_NAMED = 3


def hold_out(rows: Sequence[Placed], fraction: float) -> tuple[list[Placed], list[Placed]]:
    """Splits rows into train and eval, with about `fraction` of the distinct prompts in eval.

    The side of a prompt follows from its text alone, not from the order, the seed, or the other rows, so a file that
    grows moves none. At least one prompt is on each side; raises ConfigError if there are fewer than two.
    """
    ranked = sorted({row.prompt for row in rows})
    if len(ranked) < 2:
        raise ConfigError(f"eval_fraction needs at least 2 different prompts, got {len(ranked)} in {len(rows)} rows")
    held_out = {digest for digest in ranked if int(digest[:16], 16) < fraction * 2**64} | {ranked[0]}
    held_out -= {ranked[-1]}
    return [row for row in rows if row.prompt not in held_out], [row for row in rows if row.prompt in held_out]


def keep_apart(
    train: Sequence[Placed], held_out: Sequence[Placed], overlap: Literal["refuse", "drop-train", "drop-eval"]
) -> tuple[list[Placed], list[Placed], str]:
    """Returns train and eval without the prompts that they share, and a line on the dropped rows ("" for none).

    Raises ConfigError if `overlap` refuses, or if dropping would leave a side empty.
    """
    sides = {"train": list(train), "eval": list(held_out)}
    prompts = {side: {row.prompt for row in rows} for side, rows in sides.items()}
    shared = prompts["train"] & prompts["eval"]
    if not shared:
        return sides["train"], sides["eval"], ""
    if overlap == "refuse":
        examples = [row.where for row in sides["eval"] if row.prompt in shared][:NUM_NAMED]
        raise ConfigError(
            f"train and eval share {len(shared)} prompts, such as that of {'; '.join(examples)}: what is trained on "
            "cannot be evaluated on. data.overlap drop-train or drop-eval (--data.overlap drop-train) drops them"
            " from one side"
        )
    side = "train" if overlap == "drop-train" else "eval"
    before = len(sides[side])
    sides[side] = [row for row in sides[side] if row.prompt not in shared]
    if not sides[side]:
        raise ConfigError(f"train and eval share all {len(shared)} prompts of {side}: nothing would be left of it")
    line = f"dropped {before - len(sides[side])} of {before} {side} rows: their {len(shared)} prompts are on both sides"
    return sides["train"], sides["eval"], line
