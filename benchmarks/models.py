"""The update of a GRPO step at 1 to 500 million parameters: both model backends and TRL.

One model of the shape of Qwen3, random, fp32, one thread a side. `fast` is our decoder, `transformers` is
`--model-backend transformers`, which computes every other architecture. Before anything is timed, logprobs and gradient
norms of the three trainers must agree.

The update is forward, loss, backward and AdamW over 8 rows of 500 tokens of prompt and replies of 32 to 96: once with
a prompt of its own for each row, and once with the same for all. To TRL 1.16 both are the same work; its `GRPOTrainer`
runs without gradient checkpointing in fp32 and in bf16, its fastest settings (`peer_environments.py` has its
environment). Tokens are those of all rows, prompts included.

    python benchmarks/models.py [--sizes 1M 60M 500M] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported, and for the others

import torch
from grpo_step import AGREEMENT, TASK, trajectory
from peer_environments import run_beside_trl
from safetensors.torch import load_file
from shapes import SHAPES
from torch import Tensor
from train_step import TRL_SCRIPT
from transformers.utils import logging as transformers_logging

from agentgym.engines.protocol import Completion
from agentgym.model.policy import load_policy
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.batch.credits import flat_credit
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trajectory import Group, Trajectory

Backend = Literal["fast", "transformers"]
Dtype = Literal["float32", "bfloat16"]
BACKENDS: tuple[Backend, ...] = ("fast", "transformers")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
LOGPROB_NATS = 1e-4


@dataclass(frozen=True)
class Rows:
    """Rows of ids, the first `prompt` of each a prompt, and the advantage of each row."""

    ids: tuple[tuple[int, ...], ...]
    prompt: int
    advantages: tuple[float, ...]

    @classmethod
    def draw(cls, count: int, prompt: int, vocab_size: int, *, shared: bool) -> Rows:
        """Returns `count` rows with one prompt for all if it is `shared`, with replies of 32 to 96 random ids."""
        rng = random.Random(count)
        sizes = [rng.randint(32, 96) for _ in range(count)]
        prompts = [[rng.randrange(vocab_size) for _ in range(prompt)] for _ in range(1 if shared else count)]
        replies = [[rng.randrange(vocab_size) for _ in range(size)] for size in sizes]
        ids = tuple((*prompts[number % len(prompts)], *reply) for number, reply in enumerate(replies))
        return cls(ids, prompt, tuple(float(number % 5 - 2) for number in range(count)))

    @property
    def num_tokens(self) -> int:
        """The tokens of all rows, prompts included."""
        return sum(map(len, self.ids))

    def batch(self, logprobs: Sequence[float] | None = None) -> TrainingBatch:
        """Returns the batch of a learner; `logprobs` are those of all replies under the weights that sampled."""
        left = iter([-1.0] * self.num_tokens if logprobs is None else logprobs)
        episodes = tuple(self._episode(number, left) for number in range(len(self.ids)))
        group = Group("rows", TASK, episodes)
        return build_batch([group], [flat_credit(group, self.advantages)], aggregation="token-mean")

    def _episode(self, number: int, left: Iterator[float]) -> Trajectory:
        prompt, reply = self.ids[number][: self.prompt], self.ids[number][self.prompt :]
        old = tuple(next(left) for _ in reply)
        return trajectory(prompt, Completion(reply, old, (0,) * len(reply), "length"), "rows", number)


def make_learner(folder: Path, backend: Backend, dtype: Dtype) -> Learner:
    """Loads the model; the settings are those of a run but for the learning rate and the threads."""
    model = load_policy(folder, dtype=getattr(torch, dtype), backend=backend)
    optimizer = OptimizerConfig(learning_rate=1e-6, warmup_steps=1)
    return Learner(model, LearnerConfig(threads=1, dtype=dtype), optimizer, total_steps=1_000)


def step_s(folder: Path, backend: Backend, dtype: Dtype, rows: Rows, repeats: int) -> float:
    """Returns the median seconds of an update after one to warm up."""
    learner = make_learner(folder, backend, dtype)
    batch = rows.batch(learner.logprobs(rows.batch()).clamp(max=0.0).tolist())
    seconds = median_s(lambda: learner.update(batch), repeats)
    learner.close()
    return seconds


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Returns the median seconds of `repeats` calls after one to warm up, as TRL's side does."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def run_trl(folder: Path, rows: Rows, *, bf16: bool, repeats: int = 0, save: Path | None = None) -> float:
    """Returns the median seconds of TRL's update; with `save` it writes its logprobs and gradients there instead."""
    spec = {
        "model": str(folder),
        "rows": rows.ids,
        "prompt": rows.prompt,
        "advantages": [
            [advantage] * (len(ids) - rows.prompt) for ids, advantage in zip(rows.ids, rows.advantages, strict=True)
        ],
        "bf16": bf16,
        "checkpointing": False,
        "repeats": repeats,
        "save": None if save is None else str(save),
    }
    return run_beside_trl(TRL_SCRIPT, spec).get("seconds", 0.0)


def check(folder: Path, vocab_size: int, scratch: Path) -> tuple[float, float]:
    """Returns the largest differences of logprobs in nats and of gradient norms, relative, between the trainers."""
    rows = Rows.draw(4, 100, vocab_size, shared=True)
    run_trl(folder, rows, bf16=False, save=scratch / "trl.safetensors")
    tensors = load_file(scratch / "trl.safetensors")
    reference_M = tensors.pop("logprobs")
    norm = float(torch.stack([gradient.norm() for gradient in tensors.values()]).norm())
    nats, share = 0.0, 0.0
    for backend in BACKENDS:
        learner = make_learner(folder, backend, "float32")
        logp_M: Tensor = learner.logprobs(rows.batch()).clamp(max=0.0)
        own_norm = learner.update(rows.batch(logp_M.tolist())).grad_norm
        learner.close()
        nats = max(nats, float((logp_M - reference_M).abs().max()))
        share = max(share, abs(own_norm / norm - 1))
    assert nats < LOGPROB_NATS and share < AGREEMENT, f"the trainers differ: {nats:.2g} nats, gradients by {share:.2g}"
    return nats, share


def measure_steps(folder: Path, vocab_size: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns the tokens a second of every trainer, and prints a line for each."""
    speeds: dict[str, float] = {}
    for shared in (False, True):
        rows = Rows.draw(options.rows, options.prompt, vocab_size, shared=shared)
        for backend in BACKENDS:
            for dtype in DTYPES:
                name = f"{backend}, {dtype}, {'one prompt' if shared else 'own prompts'}"
                speeds[name] = rows.num_tokens / step_s(folder, backend, dtype, rows, options.repeats)
                print(f"    {name:42}{speeds[name]:10,.0f} tokens/s", flush=True)
    for dtype in DTYPES:
        seconds = run_trl(folder, rows, bf16=dtype == "bfloat16", repeats=options.repeats)
        speeds[f"TRL, {dtype}"] = rows.num_tokens / seconds
        print(f"    {'TRL, ' + dtype:42}{rows.num_tokens / seconds:10,.0f} tokens/s", flush=True)
    return speeds


def main() -> None:
    """Prints tokens a second, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["1M", "60M"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=500, help="its tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    results = {}
    for name in options.sizes:
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as scratch:
            folder = Path(model)
            num_parameters = shape.save(folder)
            nats, share = check(folder, shape.vocab_size, Path(scratch))
            print(
                f"{num_parameters / 1e6:.2f} million parameters: logprobs differ by {nats:.1e} nats at most,", end=" "
            )
            print(f"gradient norms by {share:.1e}\n  an update of {options.rows} rows", flush=True)
            steps = measure_steps(folder, shape.vocab_size, options)
        results[name] = {"parameters": num_parameters, "steps": steps}
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
