"""Measures what FSDP2 costs a learner of one rank, compared with one without ranks: time and memory, with offload."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from probe_case import PEAK_FLOPS, Probe, Workload, make_learner, make_model

from agentgym.trainers.parallel.ranks import Ranks
from agentgym.trainers.settings.fsdp import FsdpConfig
from agentgym.trainers.settings.learner import LearnerConfig


def train(probe: Probe, *, on_ranks: bool, **settings: Any) -> dict[str, Any]:
    """Measures a first step's memory, the time of a second one, and the collection of weights and optimizer state."""
    config = LearnerConfig(**settings)
    work, on_cpu = Workload("single", probe.shape), config.fsdp.cpu_offload
    batch, model = work.batch(), make_model(probe.shape, "cpu" if on_cpu else probe.device, torch.float32)
    if on_ranks:
        learner = make_learner(Ranks(config, "cuda" if probe.is_cuda else "cpu").shard(model), **settings)
    else:
        learner = make_learner(model, device=probe.device, **settings)
    stats = learner.update(batch)
    report = {"loss": stats.loss, "grad_norm": stats.grad_norm, "peak_gb": probe.peak_gb()}
    seconds = probe.seconds(lambda: learner.update(batch), 1, 0)
    report |= {"seconds": round(seconds, 3), "mfu": round(work.step_flops(model.config) / seconds / PEAK_FLOPS, 4)}
    if on_ranks:
        weights_s = probe.seconds(lambda: [tensor.cpu() for _, tensor in learner.weights()], 1, 0)
        report |= {"weights_s": round(weights_s, 2), "weights_peak_gb": probe.peak_gb()}
        report |= {"state_s": round(probe.seconds(learner.state_dict, 1, 0), 2), "state_peak_gb": probe.peak_gb()}
    return report


def main() -> None:
    """Runs the cases."""
    probe = Probe()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("cpu:gloo,cuda:nccl" if probe.is_cuda else "gloo", rank=0, world_size=1)
    float32, bfloat16 = {"dtype": "float32", "micro_batch_tokens": 8192}, {"dtype": "bfloat16"}
    cases: dict[str, dict[str, Any]] = {
        "no ranks, float32": {"on_ranks": False, **float32},
        "fsdp, float32": float32,
        "fsdp, bfloat16": bfloat16,
        "fsdp, bfloat16, recomputing": {
            **bfloat16,
            "fsdp": FsdpConfig(gradients="sharded"),
            "activation_checkpointing": True,
        },
    }
    if probe.is_cuda:
        cases["fsdp, bfloat16, offload"] = {**bfloat16, "fsdp": FsdpConfig(cpu_offload=True)}
    for name, settings in reversed(cases.items()):
        probe.case("ranks", lambda settings=settings: train(probe, **{"on_ranks": True, **settings}), what=name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
