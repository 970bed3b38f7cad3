"""A checkpoint of the state of a learner of several ranks: written in the background, and read by another number.

    python benchmarks/sharded_checkpoint.py [--size 1B] [--ranks 4] [--resumed 2] [--optimizer sgd]

A random model of the shape of Qwen3 takes two optimizer steps; the state after the first is copied and written while
the second is taken. Other ranks then read it and take the second step too. Prints a JSON object: the size of the state,
the seconds of copying, writing, reading and steps, the largest memory of a rank at each point (without files that are
mapped into it), and the losses of the second step, which have to agree. The resumed ranks take the first step as
well, for the weights, before they read the state over theirs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory import OwnMemory
from shapes import SHAPES, Shape
from torch.distributed.checkpoint.storage import WriteResult

from agentgym.trainers.batch.batch import StepTotals, TrainingBatch
from agentgym.trainers.checkpoints.sharded_state import StateShard, finish_state, open_state, plans_of_ranks
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.parallel.ranks import Ranks
from agentgym.trainers.parallel.sharded_tensor import shard
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

SIZES = {**SHAPES, "1B": Shape(1792, 24, 14, 5376, 32_000, head_width=128)}
NUM_ROWS, NUM_TOKENS = 4, 16
OPTIMIZERS = {
    "adamw": OptimizerConfig(learning_rate=1e-5),
    "sgd": OptimizerConfig(name="sgd", learning_rate=1e-3, settings={"momentum": 0.9}),
}


def random_batch(vocab_size: int, num_rows: int = NUM_ROWS, num_tokens: int = NUM_TOKENS) -> TrainingBatch:
    """Returns rows of random ids, all of which are trained."""
    generator = torch.Generator().manual_seed(0)
    ids_RT = torch.randint(vocab_size, (num_rows, num_tokens + 1), generator=generator)
    row_N = torch.arange(num_rows).repeat_interleave(num_tokens)
    size = len(row_N)
    chance_N = torch.full((size,), -torch.tensor(vocab_size).log().item())
    return TrainingBatch(
        ids_N=ids_RT[:, :-1].reshape(-1),
        target_N=ids_RT[:, 1:].reshape(-1),
        position_N=torch.arange(num_tokens).repeat(num_rows),
        mask_N=torch.ones(size, dtype=torch.bool),
        sampled_logp_N=chance_N,
        old_logp_N=chance_N,
        correction_N=torch.ones(size),
        advantage_N=torch.randn(num_rows, generator=generator)[row_N],
        return_N=torch.zeros(size),
        old_value_N=torch.zeros(size),
        weight_N=torch.full((size,), 1 / size),
        policy_version_N=torch.zeros(size, dtype=torch.int64),
        reply_version_N=torch.zeros(size, dtype=torch.int64),
        row_N=row_N,
        trajectory_N=row_N.clone(),
        seqlens=(num_tokens,) * num_rows,
        totals=StepTotals(size, num_rows, num_rows),
    )


class Rank:
    """One of the ranks, with a learner of the model of a folder."""

    def __init__(self, options: argparse.Namespace, home: Path, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(str(home / f"store-{size}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
        self.rank, self.size, self.state = rank, size, home / "state"
        self.memory = OwnMemory()
        config = LearnerConfig(micro_batch_tokens=NUM_TOKENS, activation_checkpointing=True)
        self.learner = Learner(Ranks().load(home / "model"), config, OPTIMIZERS[options.optimizer], total_steps=4)
        self.batch = random_batch(self.learner.model.vocab_size)
        self.found: dict[str, Any] = {"loaded_mb": self.memory.largest_mb()}

    def learn(self, name: str) -> None:
        """Takes an optimizer step."""
        started = time.perf_counter()
        self.found[name] = self.learner.update(self.batch).loss
        self.found[f"{name}_s"] = time.perf_counter() - started
        self.found[f"{name}_mb"] = self.memory.largest_mb()

    def save(self) -> None:
        """Copies the state, and writes it while the next step is taken."""
        started = time.perf_counter()
        copied = StateShard(self.learner.state_dict(shard), self.rank, plans_of_ranks)
        self.found["copy_s"] = time.perf_counter() - started
        self.found["copied_mb"] = self.memory.largest_mb()
        with ThreadPoolExecutor(1) as thread:
            written = thread.submit(self._write, copied)
            self.learn("second")
            result = written.result()
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, result)
        if self.rank == 0:
            finish_state(self.state, copied.structure, copied.metadata, results)

    def _write(self, copied: StateShard) -> list[WriteResult]:
        started = time.perf_counter()
        result = copied.write(self.state)
        self.found["write_s"] = time.perf_counter() - started
        return result

    def load(self) -> None:
        """Reads this rank's shards of the state."""
        started = time.perf_counter()
        self.learner.load_state_dict(open_state(self.state))
        self.found["read_s"] = time.perf_counter() - started
        self.found["read_mb"] = self.memory.largest_mb()


def run(options: argparse.Namespace, home: Path, rank: int, size: int, *, resumes: bool) -> None:
    """Takes the steps of one rank, and writes what it found."""
    mine = Rank(options, home, rank, size)
    mine.learn("first")
    if resumes:
        mine.load()
        mine.learn("second")
    else:
        mine.save()
    dist.barrier()
    (home / f"found-{size}-{rank}.json").write_text(json.dumps(mine.found))
    dist.destroy_process_group()


def run_ranks(options: argparse.Namespace, home: Path, size: int, *, resumes: bool) -> list[dict[str, Any]]:
    """Returns what the ranks found."""
    context = get_context("spawn")
    ranks = [
        context.Process(target=run, args=(options, home, rank, size), kwargs={"resumes": resumes})
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert not any(process.exitcode for process in ranks)
    return [json.loads((home / f"found-{size}-{rank}.json").read_text()) for rank in range(size)]


def main() -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1B", choices=SIZES)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--resumed", type=int, default=2)
    parser.add_argument("--optimizer", default="sgd", choices=OPTIMIZERS)
    parser.add_argument("--folder", help="for the model and the state, by default a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        home = Path(folder)
        saving = get_context("spawn").Process(target=SIZES[options.size].save, args=(home / "model",))
        saving.start()
        saving.join()
        first = run_ranks(options, home, options.ranks, resumes=False)
        state_gb = sum(path.stat().st_size for path in (home / "state").iterdir()) / 1e9
        resumed = run_ranks(options, home, options.resumed, resumes=True)
    print(json.dumps({"state_gb": round(state_gb, 3), "saved": _most(first), "resumed": _most(resumed)}, indent=2))


def _most(reports: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: round(max(rank[name] for rank in reports), 4) for name in reports[0]}


if __name__ == "__main__":
    main()
