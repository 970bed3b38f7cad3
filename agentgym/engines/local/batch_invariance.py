"""Checks that this machine's matrix products give a row the same bits whichever other rows share the step."""

from __future__ import annotations

import numpy as np
import torch

from agentgym.engines.local.rows import Rows
from agentgym.engines.local.runners import Runner

__all__ = ["batch_invariance_findings"]

_NUM_SLOTS, _WINDOW = 6, 512
"""Few slots, and one of them long: sums of 400 numbers and more are divided by some libraries."""
_Steps = list[list[tuple[int, int, int]]]  # per step: (slot, first position, number of rows)


@torch.inference_mode()
def batch_invariance_findings(runner: Runner) -> list[str]:
    """Returns reasons why replies may depend on other requests or on how a prefix was computed; empty without any.

    The same tokens run as one prompt, token by token, and together with longer sequences; logits are compared bitwise.
    The runner's cache must be empty; what is written there is erased.
    """
    cache = runner.cache
    window, num_slots = min(_WINDOW, cache.window), min(_NUM_SLOTS, cache.num_slots)
    length, others = window * 5 // 8, range(1, num_slots)
    if length < 4:
        return []
    random = np.random.default_rng(0)
    cache.tokens_SW[:num_slots, :window] = random.integers(runner.model.vocab_size, size=(num_slots, window))
    last_S = [window - 1, window - 1, *(max(2, window // 8 - slot) for slot in others)]  # the last position of each
    beside = [(slot, 0, last_S[slot]) for slot in others]
    checks: dict[str, _Steps] = {
        "a token decoded alone and the same token decoded with longer sequences": [
            [(0, 0, length - 1), *beside],
            [(0, length - 1, 1), *((slot, last_S[slot], 1) for slot in others)],
        ],
    }
    if cache.states:  # a prompt is read in another form than a token is decoded, and always in the same parts
        whole = _last_logits(runner, [[(0, 0, length - 1)], [(0, length - 1, 1)]])
    else:
        whole = _last_logits(runner, [[(0, 0, length)]])
        checks["a token decoded alone and the same token read in a prompt"] = [
            [(0, 0, length - 3)],
            *([(0, position, 1)] for position in range(length - 3, length)),
        ]
        checks["a prompt read alone and the same prompt read with others"] = [[(0, 0, length), *beside]]
    differ = [name for name, steps in checks.items() if not torch.equal(_last_logits(runner, steps), whole)]
    for kv in cache.kv:
        kv[:, :num_slots, :, :window] = 0
    return [f"{name} differ in their last bits on this machine" for name in differ]


def _last_logits(runner: Runner, steps: _Steps) -> torch.Tensor:
    for step in steps:
        decode = [part for part in step if part[2] == 1]
        extends = tuple(part for part in step if part[2] > 1)
        parts = [*decode, *extends]
        rows = Rows(
            np.concatenate([np.full(size, slot) for slot, _, size in parts]),
            np.concatenate([np.arange(start, start + size) for _, start, size in parts]),
            len(decode),
            extends,
            np.array([parts[0][2] - 1]),
        )
        logits_1V = runner.forward(rows)
    return logits_1V
