"""The seconds and the GPU memory of the parts of a GRPO step: a line of JSON for each part of each step.

    python benchmarks/gpu/step_parts.py --engine sglang_asleep --shape 4B --output FOLDER --sglang-python PYTHON

The job is that of `gpu_step.py`, in which a step is measured whole. Each part waits for the GPU before and after, so a
step takes a little longer. `--profile N` also writes torch's table of the operators of the N-th update.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_step import ENGINES, Job, even_ids, make_model

from agentgym.engines.servers.sleep import ServerSleep
from agentgym.trainers.checkpoints.writer import Checkpoints
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.optimizer import PolicyOptimizer
from agentgym.trainers.loop import learn_step
from agentgym.trainers.loop.open_parts import LocalWeights
from agentgym.trainers.loop.trainer import Trainer

STARTED = time.perf_counter()
PARTS: list[tuple[Any, str]] = [
    *((learn_step, name) for name in ("credit_step", "build_batch")),
    *((Learner, name) for name in ("_share", "_total", "update", "logprobs")),
    *((PolicyOptimizer, "step"), (LocalWeights, "copy"), (Checkpoints, "_write")),
]
AWAITED: list[tuple[Any, str]] = [(LocalWeights, "send"), (ServerSleep, "begin"), (ServerSleep, "end")]


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gigabytes() -> dict[str, float]:
    """Returns what is used of the GPU's memory, by all processes and by torch in this one."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    numbers = {
        "used": total - free,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }
    return {f"{name}_gb": round(number / 1e9, 2) for name, number in numbers.items()}


def tell(part: str, started: float, cpu_started: float, before: dict[str, float]) -> None:
    """Prints the line of a part that ended now."""
    synchronize()
    now, cpu_now = time.perf_counter(), time.process_time()
    times = {"at_s": round(now - STARTED, 2), "s": round(now - started, 4), "cpu_s": round(cpu_now - cpu_started, 4)}
    memory = {f"{name}_before": number for name, number in before.items() if name == "used_gb"}
    print(json.dumps({"part": part, **times, **memory, **gigabytes()}), flush=True)


def time_parts() -> None:
    """Makes all parts tell when they end."""
    for owner, name in PARTS:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def run_and_tell(*arguments: Any, plain: Callable[..., Any] = plain, part: str = name, **options: Any) -> Any:
            synchronize()
            begun = (time.perf_counter(), time.process_time(), gigabytes())
            try:
                return plain(*arguments, **options)
            finally:
                tell(part, *begun)

        setattr(owner, name, run_and_tell)
    for owner, name in AWAITED:
        awaited = getattr(owner, name)

        @functools.wraps(awaited)
        async def run_and_tell_later(
            *arguments: Any, plain: Callable[..., Any] = awaited, part: str = name, **options: Any
        ) -> Any:
            synchronize()
            begun = (time.perf_counter(), time.process_time(), gigabytes())
            try:
                return await plain(*arguments, **options)
            finally:
                tell(part, *begun)

        setattr(owner, name, run_and_tell_later)


def profile_update(number: int, path: Path) -> None:
    """Has the update of this number write a table of its operators."""
    plain, calls = Learner.update, iter(range(1, 1_000_000))

    def update(*arguments: Any, **options: Any) -> Any:
        if next(calls) != number:
            return plain(*arguments, **options)
        with torch.profiler.profile() as profiler:
            stats = plain(*arguments, **options)
            synchronize()
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        path.write_text(profiler.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=70))
        return stats

    Learner.update = update  # type: ignore[assignment]


def main() -> None:
    """Trains the job of `gpu_step.py` with one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="local")
    parser.add_argument("--shape", default="0.6B", help="tiny, 0.6B, 1.7B, 4B or 8B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--reply", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--sglang-python", default="")
    parser.add_argument("--sglang-args", default="", help="further arguments of SGLang's server, as one word")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="the update whose operators are counted")
    parser.add_argument("--output", type=Path, required=True, help="folder of the model and the runs")
    options = parser.parse_args()
    options.head_kernel = "torch"
    options.output.mkdir(parents=True, exist_ok=True)
    job = replace(Job.of(options, options.output), steps=options.steps)
    if not (job.model / "config.json").exists():
        make_model(job)
        torch.cuda.empty_cache()
    if options.profile:
        profile_update(options.profile, options.output / "operators.txt")
    time_parts()
    Trainer(job.config(options.engine), options.output / options.engine, reward=even_ids).fit()


if __name__ == "__main__":
    main()
