"""Measures what a GPU does with the learner and the in-process engine: run this first where there is a GPU.

Each step is a process of its own that prints a JSON line for each of its cases, and appends it to `FOLDER/STEP.jsonl`.
A case that fails prints its error, and the next begins. Models have random weights of a published shape; the step
`real_model` trains the one of `--model`.

    python benchmarks/gpu/probe.py [STEP ...] [--output FOLDER] [--limit-s 120] [--shape 0.6B]
    python benchmarks/gpu/probe.py real_model --model FOLDER --limit-s 600
    python benchmarks/gpu/probe.py --device cpu --shape tiny          # does it run at all, anywhere

What each step measures is in its file. The figures of machines that were measured are beside this file, by machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

STEPS = "smoke sampling learning attention ranks sizes compile architectures published real_model".split()
HERE = Path(__file__).parent


def run(step: str, options: argparse.Namespace) -> bool:
    """Runs a step, copies its lines to the output, and returns whether it ended by itself and well."""
    command = [sys.executable, str(HERE / f"{step}_cases.py"), "--device", options.device, "--shape", options.shape]
    command += ["--limit-s", str(options.limit_s), "--model", options.model, "--chat-template", options.chat_template]
    paths = [str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    print(f"== {step}, {time.strftime('%T')}", flush=True)
    errors = options.output / f"{step}.err"
    with (options.output / f"{step}.jsonl").open("a") as lines, errors.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.write(line)
            lines.flush()
    if process.wait():
        print(f"{step} ended with {process.returncode}: {errors.read_text()[-1500:]}", flush=True)
    return process.returncode == 0


def main() -> None:
    """Runs the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"all by default: {' '.join(STEPS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="0.6B", help="tiny, 0.6B, 1.7B, 4B or 8B")
    parser.add_argument("--limit-s", type=float, default=120.0, help="no case of a step begins after so many seconds")
    parser.add_argument("--model", default="", help="a model folder or GGUF file, for real_model")
    parser.add_argument("--chat-template", default="", help="of a base model")
    parser.add_argument("--output", type=Path, default=Path("gpu_probe"), help="a folder for the lines")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    results = [run(step, options) for step in options.steps or STEPS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
