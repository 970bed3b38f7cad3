"""The update of a GRPO step, or a step of lessons, at 1 to 500 million parameters: both model backends and TRL.

A model of the shape of Qwen3, random, or that of a folder; one thread a side. `fast` is our decoder, `transformers` is
`--model-backend transformers`, which computes every other architecture. Before anything is timed, logprobs and gradient
norms of the three trainers must agree.

The update is forward, loss, backward and AdamW over 8 rows of 500 tokens of prompt and replies of 32 to 96: once with
a prompt of its own for each row, and once with the same for all. To TRL 1.16 both are the same work; its `GRPOTrainer`
runs without gradient checkpointing in fp32 and in bf16, its fastest settings (`peer_environments.py` has its
environment). Tokens are those of all rows, prompts included; seconds are the CPU's.

With `--objective sft` all rows have their mean log likelihood as the loss, and TRL's trainer is its `SFTTrainer`.

    python benchmarks/models.py [--sizes 1M 60M 500M] [--json]
    python benchmarks/models.py --model FOLDER --objective sft --rows 32 --prompt 20 --reply 3 3
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
from functools import partial
from pathlib import Path
from typing import Literal, get_args

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported, and for the others

import torch
from grpo_step import AGREEMENT, TASK, trajectory
from peer_environments import run_beside_trl
from safetensors.torch import load_file
from shapes import SHAPES, backends_of
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
Objective = Literal["grpo", "sft"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
LOGPROB_NATS = 1e-3


@dataclass(frozen=True)
class Rows:
    """Rows of ids, the first `prompt` of each a prompt, and the advantage of each row."""

    ids: tuple[tuple[int, ...], ...]
    prompt: int
    advantages: tuple[float, ...]
    objective: Objective = "grpo"

    @classmethod
    def draw(
        cls,
        count: int,
        prompt: int,
        vocab_size: int,
        *,
        shared: bool,
        objective: Objective = "grpo",
        reply: Sequence[int] = (32, 96),
    ) -> Rows:
        """Returns `count` rows with one prompt for all if it is `shared`, with replies of `reply` random ids."""
        rng = random.Random(count)
        sizes = [rng.randint(*reply) for _ in range(count)]
        prompts = [[rng.randrange(vocab_size) for _ in range(prompt)] for _ in range(1 if shared else count)]
        replies = [[rng.randrange(vocab_size) for _ in range(size)] for size in sizes]
        ids = tuple((*prompts[number % len(prompts)], *reply) for number, reply in enumerate(replies))
        gains = tuple(1.0 if objective == "sft" else float(number % 5 - 2) for number in range(count))
        return cls(ids, prompt, gains, objective)

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


def make_learner(folder: Path, backend: Backend, dtype: Dtype, objective: Objective) -> Learner:
    """Loads the model; the settings are those of a run but for the learning rate and the threads."""
    loss = "reinforce" if objective == "sft" else None
    model = load_policy(folder, dtype=getattr(torch, dtype), backend=backend)
    optimizer = OptimizerConfig(learning_rate=1e-6, warmup_steps=1)
    return Learner(model, LearnerConfig(threads=1, dtype=dtype, loss=loss), optimizer, total_steps=1_000)


def step_s(folder: Path, backend: Backend, dtype: Dtype, rows: Rows, repeats: int) -> float:
    """Returns the median CPU seconds of an update after one to warm up."""
    learner = make_learner(folder, backend, dtype, rows.objective)
    batch = rows.batch(learner.logprobs(rows.batch()).clamp(max=0.0).tolist())
    seconds = median_s(lambda: learner.update(batch), repeats)
    learner.close()
    return seconds


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Returns the median CPU seconds of `repeats` calls after one to warm up, as TRL's side does."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[1:])


def run_trl(folder: Path, rows: Rows, *, bf16: bool, repeats: int = 0, save: Path | None = None) -> float:
    """Returns the median CPU seconds of TRL's update; with `save` it writes logprobs and gradients there instead."""
    spec = {
        "model": str(folder),
        "rows": rows.ids,
        "prompt": rows.prompt,
        "advantages": [
            [advantage] * (len(ids) - rows.prompt) for ids, advantage in zip(rows.ids, rows.advantages, strict=True)
        ],
        "objective": rows.objective,
        "bf16": bf16,
        "checkpointing": False,
        "repeats": repeats,
        "save": None if save is None else str(save),
    }
    return run_beside_trl(TRL_SCRIPT, spec).get("cpu_seconds", 0.0)


def check(folder: Path, rows: Rows, scratch: Path) -> tuple[float, float]:
    """Returns the largest differences of logprobs in nats and of gradient norms, relative, between the trainers."""
    run_trl(folder, rows, bf16=False, save=scratch / "trl.safetensors")
    tensors = load_file(scratch / "trl.safetensors")
    reference_M = tensors.pop("logprobs")
    norm = float(torch.stack([gradient.norm() for gradient in tensors.values()]).norm())
    nats, share = 0.0, 0.0
    for backend in backends_of(folder):
        learner = make_learner(folder, backend, "float32", rows.objective)
        logp_M: Tensor = learner.logprobs(rows.batch()).clamp(max=0.0)
        own_norm = learner.update(rows.batch(logp_M.tolist())).grad_norm
        learner.close()
        nats = max(nats, float((logp_M - reference_M).abs().max()))
        share = max(share, abs(own_norm / norm - 1))
    assert nats < LOGPROB_NATS and share < AGREEMENT, f"the trainers differ: {nats:.2g} nats, gradients by {share:.2g}"
    return nats, share


def measure_steps(folder: Path, draw: Callable[..., Rows], options: argparse.Namespace) -> dict[str, float]:
    """Returns the tokens a second of every trainer, and prints a line for each."""
    speeds: dict[str, float] = {}
    for shared in (False, True):
        rows = draw(options.rows, options.prompt, shared=shared)
        for backend in backends_of(folder):
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
    parser.add_argument("--model", help="a model folder, in place of the random ones")
    parser.add_argument("--objective", choices=get_args(Objective), default="grpo")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=500, help="its tokens")
    parser.add_argument(
        "--reply", type=int, nargs=2, default=[32, 96], help="the fewest and the most tokens of a reply"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    results = {}
    for name in [options.model] if options.model else options.sizes:
        with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory() as scratch:
            folder = Path(options.model or temporary)
            if not options.model:
                SHAPES[name].save(folder)
            vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
            draw = partial(Rows.draw, vocab_size=vocab_size, objective=options.objective, reply=options.reply)
            nats, share = check(folder, draw(4, 100, shared=True), Path(scratch))
            print(f"{name}: logprobs differ by {nats:.1e} nats at most, gradient norms by {share:.1e}")
            print(f"  an update of {options.rows} rows", flush=True)
            results[name] = measure_steps(folder, draw, options)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
