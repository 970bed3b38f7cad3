"""A check of an environment's tasks: that there are enough to train on some and to hold others out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.envs.base.text_env import TextEnv
from agentgym.testing.contracts.env_subject import Check, Complaint, EnvUnderTest

__all__ = ["TASK_CHECKS"]

NUM_HELD_OUT = 200
NUM_TRAINING = 10_000
BUDGET_S = 1.0
"""The seconds for the held-out draws, and again for those of training: a slow environment gets fewer draws."""
LEAST_DISTINCT = 0.8
"""The share of the held-out draws that have to be distinct."""
STRIDE = 7919
"""The distance of training seeds, as in a run."""


def _held_out_tasks(make: EnvUnderTest) -> Iterator[Complaint]:
    env = make()
    if env.num_tasks == 1:
        env.close()
        yield "not claimed", "it has one task"
        return
    held_out = _digests(env, range(EVAL_SEED_START, EVAL_SEED_START + NUM_HELD_OUT))
    training = _digests(env, range(0, STRIDE * NUM_TRAINING, STRIDE))
    env.close()
    shared, distinct = set(held_out) & set(training), len(set(held_out))
    drawn = f"{len(held_out)} held-out and {len(training):,} training tasks were drawn"
    if distinct == 1 and len(held_out) > 1 and len(set(training)) == 1:
        yield (
            "not claimed",
            f"{drawn}, and the model is shown the same at the begin of all: what differs is held out by seed alone. "
            "task_identity() says what distinguishes tasks",
        )
    elif shared:
        overlap = sum(digest in shared for digest in held_out)
        yield (
            "not claimed" if env.own_split else "warning",
            f"{drawn}: {overlap} of the held-out ones are training tasks, so an evaluation measures what was trained "
            "on. There are too few tasks: draw from more, or let task_identity() say what distinguishes them",
        )
    elif distinct < LEAST_DISTINCT * len(held_out):
        yield (
            "not claimed",
            f"{drawn}: {distinct} of the held-out ones are distinct, and the intervals of an evaluation take these as "
            "the draws",
        )


def _digests(env: TextEnv, seeds: Iterable[int]) -> list[str]:
    """Returns the digests of the tasks of these seeds, as many as there is time for."""
    end, digests = time.monotonic() + BUDGET_S, list[str]()
    for seed in seeds:
        env.reset(seed=seed)
        digests.append(env.task_digest)
        if time.monotonic() > end:
            break
    return digests


TASK_CHECKS: dict[str, Check] = {"held-out tasks": _held_out_tasks}
