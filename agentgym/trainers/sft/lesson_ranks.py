"""The processes that torchrun starts, as the ranks of a model that learns from recorded text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from agentgym.errors import ConfigError
from agentgym.trainers.settings.learner import LearnerConfig

if TYPE_CHECKING:
    from agentgym.trainers.parallel.ranks import Ranks

__all__ = ["join_ranks", "of_rank_0"]

T = TypeVar("T")


@contextmanager
def join_ranks(learner: LearnerConfig) -> Iterator[Ranks | None]:
    """Joins the other processes that torchrun's variables name, and yields them as ranks; None for one that is alone.

    On GPUs passes are in bfloat16 unless the settings name another type, and weights in float32. Only rank 0 prints.
    Raises ConfigError for a device with a number, since each rank has that of its own.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() or os.environ["WORLD_SIZE"] == "1":
        yield None
        return
    device, fsdp = learner.device, learner.fsdp
    on_gpu = device != "cpu"
    if on_gpu and device != "cuda":
        raise ConfigError(f"each rank has a GPU of its own: --device cuda, got {device}")
    if on_gpu and "LOCAL_RANK" not in os.environ:
        raise ConfigError("no variable LOCAL_RANK says which GPU is this rank's: begin the ranks with torchrun")
    from agentgym.trainers.parallel.ranks import Ranks, open_group  # here: it takes a second

    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    open_group(on_gpu=on_gpu)
    if fsdp.param_dtype is None and learner.weights_dtype == "bfloat16":
        fsdp = replace(fsdp, param_dtype="bfloat16")
    try:
        ranks = Ranks(fsdp, device, mesh=learner.mesh)
        if ranks.rank == 0:
            yield ranks
        else:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield ranks
    finally:
        sys.stdout.flush()
        dist.destroy_process_group()


def of_rank_0(ranks: Ranks | None, value: T) -> T:
    """Returns the value that rank 0 has; all ranks have to call it."""
    found = [value]
    if ranks is not None:
        dist.broadcast_object_list(found, src=0)
    return found[0]
