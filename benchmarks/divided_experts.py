"""What ranks of a mixture receive from each other, and their memory, with experts gathered and with experts divided.

    python benchmarks/divided_experts.py [--ranks 2] [--experts 16] [--tokens 512] [--expert 1 2] [--gradients sharded]

A random Qwen3-MoE takes two optimizer steps with AdamW for each value of `learner.mesh.expert`. The table has the
megabytes that rank 0 receives in the second step, by collective, over its layers and passes; the largest memory that
the rank takes for that step; the bytes of experts that it keeps; the seconds of the step, on cores that ranks share;
and the gradient norm, which has to agree.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory import OwnMemory
from sharded_checkpoint import random_batch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.parallel.ranks import Ranks
from agentgym.trainers.settings.fsdp import FsdpConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.mesh import MeshConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

MIB = 2**20
VOCABULARY = 1000


class Received(TorchDispatchMode):
    """Counts the bytes that this process receives from others, by collective."""

    def __init__(self, owners: int) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self._place = dist.get_rank() % owners

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            large, small = sorted((args[0], args[1]), key=torch.Tensor.numel, reverse=True)
            self.bytes[name] += large.nbytes - small.nbytes
        elif name == "alltoall_base_":
            sizes = list(args[3]) or [1] * len(args[0])
            others = sum(sizes) - sizes[self._place]
            self.bytes[name] += others * args[0][:1].nbytes if len(args[0]) else 0
        return func(*args, **(kwargs or {}))


def save_mixture(options: argparse.Namespace, folder: Path) -> None:
    """Saves a random mixture."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        moe_intermediate_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=options.width // 8,
        num_experts=options.experts,
        num_experts_per_tok=options.chosen,
        max_position_embeddings=2048,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def learn(options: argparse.Namespace, folder: Path, expert: int, rank: int, answer: Any) -> None:
    """Takes two steps as one of the ranks; rank 0 answers with what it saw of the second."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{expert}"), options.ranks)
    timeout = timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks, timeout=timeout)
    config = LearnerConfig(
        micro_batch_tokens=options.tokens, fsdp=FsdpConfig(gradients=options.gradients), mesh=MeshConfig(expert=expert)
    )
    model = Ranks(config).load(folder)
    learner = Learner(model, config, OptimizerConfig(learning_rate=1e-5), total_steps=2)
    batch = random_batch(VOCABULARY, options.tokens * options.ranks // 16, 16)
    learner.update(batch)
    memory, received, started = OwnMemory(), Received(expert), time.monotonic()
    memory.largest_mb()
    with received:
        stats = learner.update(batch)
    own = (stack for name, stack in learner.model.named_parameters() if ".experts." in name)
    own_bytes = sum(stack.to_local().nbytes for stack in own if isinstance(stack, DTensor))
    seconds = time.monotonic() - started
    numbers = [received.bytes[name] / MIB for name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")]
    if rank == 0:
        answer.put([*numbers, memory.largest_mb(), own_bytes / MIB, seconds, stats.grad_norm])
    dist.destroy_process_group()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    sizes = {"ranks": 2, "width": 512, "layers": 4, "experts": 16, "chosen": 4, "tokens": 512}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--expert", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--gradients", default="sharded")
    options = parser.parse_args()
    print("| expert | gathered | gradients | tokens | memory MiB | experts held | seconds | norm |")
    print("|---|---|---|---|---|---|---|---|")
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        save_mixture(options, Path(temporary))
        for expert in options.expert:
            answer = spawn.Queue()
            places = [(options, Path(temporary), expert, rank, answer) for rank in range(options.ranks)]
            ranks = [spawn.Process(target=learn, args=place) for place in places]
            for rank in ranks:
                rank.start()
            *numbers, norm = answer.get(timeout=900)
            for rank in ranks:
                rank.join()
            print("|", expert, "|", " | ".join(f"{number:.1f}" for number in numbers), f"| {norm:.5f} |", flush=True)


if __name__ == "__main__":
    main()
