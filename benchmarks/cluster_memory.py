"""What each process of a run on Ray takes of memory, and how long its weights take to engines and to a checkpoint.

    python benchmarks/cluster_memory.py [--size 500M] [--learners 2] [--engines 1] [--steps 3] [-- OPTION ...]

A random model of the shape of Qwen3 learns from a few short replies, with a checkpoint after each step. Prints a JSON
object: for each kind of process the largest private memory (in GB; what the object store shares is not in it), for the
process of `agentgym train` by step, and the seconds of each step's weights and checkpoint. What is behind `--` goes to
`agentgym train`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from kills import ENV
from shapes import SHAPES

from agentgym.embedded import embedded_folder
from agentgym.trainers.checkpoints.checkpoint import checkpoint_folders, copy_tokenizer

POLL_S = 0.1
KINDS = {"ray::RankActor": "rank", "ray::EngineActor": "engine", "ray::EpisodeActor": "worker", "ray::Board": "board"}


def main() -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="500M", choices=SHAPES)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("more", nargs="*", help="options of agentgym train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        size = SHAPES[options.size].save(home / "model")
        copy_tokenizer(embedded_folder(), home / "model")
        (home / "luck.py").write_text(ENV)
        words = [
            *f"train --env TextGame-v0 --model {home / 'model'} --reward.function {home / 'luck.py'}:varied".split(),
            *f"--executor ray --ray.learners {options.learners} --ray.engines {options.engines}".split(),
            *"--ray.workers 1".split(),
            *f"--steps {options.steps} --tasks 2 --group-size 2 --eval.episodes 0 --limits.turn-tokens 12".split(),
            *"--limits.context-window 1024 --limits.max-turns 2 --local.num-slots 4".split(),
            *"--checkpoint.every 1 --checkpoint.keep 1".split(),
            *f"--output {home / 'run'}".split(),
        ]
        print(json.dumps({"parameters": size} | measure([*words, *options.more], home / "run"), indent=2))


def measure(words: Sequence[str], run: Path) -> dict[str, object]:
    """Trains, and returns the largest private memory by kind of process and the seconds of weights."""
    driver = psutil.Popen([sys.executable, "-m", "agentgym", *words])
    largest: dict[str, float] = defaultdict(float)
    by_step: dict[int, float] = defaultdict(float)
    written: dict[str, float] = {}
    started = time.monotonic()
    while driver.poll() is None:
        time.sleep(POLL_S)
        with suppress(psutil.Error):
            mine = driver.memory_full_info().uss / 1e9
            step = _num_steps(run)
            by_step[step] = max(by_step[step], mine)
            largest["driver"] = max(largest["driver"], mine)
            for process in driver.children(recursive=True):
                _note(process, largest)
        for checkpoint in checkpoint_folders(run):
            written.setdefault(checkpoint.name, time.monotonic() - started)
    if driver.returncode:
        raise subprocess.CalledProcessError(driver.returncode, "agentgym train")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("sync_bytes", "sync_gather_s", "sync_transfer_s", "sync_load_s", "update_s", "elapsed_s")
    return {
        "private_gb": {kind: round(gb, 3) for kind, gb in largest.items()},
        "driver_gb_by_step": {step: round(gb, 3) for step, gb in by_step.items()},
        "steps": [{name: round(line[name], 2) for name in names if name in line} for line in lines],
        "checkpoint_at_s": {name: round(seconds, 1) for name, seconds in written.items()},
    }


def _num_steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def _note(process: psutil.Process, largest: dict[str, float]) -> None:
    with suppress(psutil.Error):
        title = " ".join(process.cmdline())
        kind = next((name for start, name in KINDS.items() if title.startswith(start)), None)
        if kind is not None:
            largest[kind] = max(largest[kind], process.memory_full_info().uss / 1e9)


if __name__ == "__main__":
    main()
