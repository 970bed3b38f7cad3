"""A pretrained model learns a task by the package's own commands: its curves, seconds and memory, in one JSON file.

The phases are processes of `agentgym`: the model is evaluated, learns from lessons, is evaluated, learns from rewards
(GRPO) and is evaluated; the run is verified and exported. Then transformers alone loads the export: it must give the
same logprobs, and its replies must end by themselves. With `--trl`, the default where TRL is installed, the same GRPO
step and the same step of lessons are timed beside it (`peer_environments.py` makes its environment).

`--task sums` asks for sums of two numbers from 10 to 49; `--task orders` is examples/orders.py, several turns with
tools. A phase that is finished is not run again, and the same command resumes what was interrupted.

    python benchmarks/real_model.py --model FOLDER|FILE.gguf --chat-template gemma3 --output runs/real
    python benchmarks/real_model.py --model FOLDER --task orders --device cuda --minutes 10 --output runs/orders
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from peer_environments import is_here

HERE = Path(__file__).resolve().parent
ORDERS = f"{HERE.parent / 'examples' / 'orders.py'}:Orders"
SUMS_OF_FILE = {"lessons": 400, "tasks": 800, "held_out": 400}
"""The questions of each file, 1,600 different ones in all."""
NUM_CHECKED = 16
"""The episodes whose replies transformers computes again."""
FLOAT32_NATS, BFLOAT16_NATS = 1e-3, 0.03
"""The difference of logprobs that rounding explains: the largest one in float32, the mean one in bfloat16."""
CURVE = ("step", "success", "loss", "entropy", "grad_norm", "step_s", "generate_s", "update_s", "peak_gpu_memory_mb")
"""The numbers of a run's steps."""
LEFT_OUT = ("at_k", "data", "environments", "files", "properties")
"""Parts of a command's JSON that other files have as well."""
POLL_S = 0.1


@dataclass(frozen=True)
class Task:
    """The sizes of a task's steps on a CPU; steps on a GPU are four times as large."""

    turn_tokens: int
    context_window: int
    batch_size: int
    """Rows or demonstrations of a step of lessons."""
    num_tasks: int
    """Tasks of a step of GRPO, each with a group of 8 episodes."""


TASKS = {"sums": Task(8, 256, 32, 16), "orders": Task(64, 2048, 8, 8)}
STEPS = {"cpu": (40, 12), "cuda": (40, 30)}
"""Steps of lessons and of GRPO."""


@dataclass(frozen=True)
class Phase:
    """A process of the programme."""

    name: str
    words: tuple[str, ...]
    """The command after `python`."""
    resumes: bool = False
    """True if `--resume` continues it."""

    @classmethod
    def of_command(cls, command: str, *words: object, output: Path | None = None) -> Phase:
        """Returns the phase of a command of the package, named by its folder if it has one."""
        where = () if output is None else ("--output", output)
        name = command if output is None else output.name
        return cls(name, tuple(map(str, ("-m", "agentgym", command, *words, *where, "--json"))), output is not None)

    @classmethod
    def of_script(cls, name: str, script: str, *words: object) -> Phase:
        """Returns the phase of a script beside this one."""
        return cls(name, tuple(map(str, (HERE / script, *words))))


def write_sums(folder: Path, seed: int) -> None:
    """Writes the questions: no file has one that another file has."""
    pairs = [(first, second) for first in range(10, 50) for second in range(10, 50)]
    random.Random(seed).shuffle(pairs)
    rest = iter(pairs)
    for name, count in SUMS_OF_FILE.items():
        lines = []
        for first, second in islice(rest, count):
            prompt, answer = f"What is {first} + {second}?", str(first + second)
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            lines.append({"messages": messages} if name == "lessons" else {"prompt": prompt, "answer": answer})
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def list_phases(options: argparse.Namespace) -> list[Phase]:
    """Returns the phases in their order."""
    folder, task, is_gpu = options.output, TASKS[options.task], options.device.startswith("cuda")
    scale = 4 if is_gpu else 1
    lesson_steps, steps = (options.steps or usual for usual in STEPS["cuda" if is_gpu else "cpu"])
    lessons, rewards, export = (folder / name for name in ("lessons", "rewards", "export"))
    taught = played = held_out = ("--env", ORDERS)
    if options.task == "sums":
        files = {"--conversations": "lessons", "--data.train": "tasks", "--data.eval": "held_out"}
        taught, played, held_out = ((option, folder / f"{name}.jsonl") for option, name in files.items())
    first = (options.model, *(("--chat-template", options.chat_template) if options.chat_template else ()))

    def evaluation(name: str, *policy: object) -> Phase:
        sizes = ("--num-tasks", options.episodes, "--turn-tokens", task.turn_tokens)
        where = ("--context-window", task.context_window, "--device", options.device, "--seed", options.seed)
        return Phase.of_command("eval", *held_out, "--policy", *policy, *sizes, *where, output=folder / name)

    def learning(num_steps: int, rate: str) -> tuple[object, ...]:
        where = ("--learner.device", options.device, "--eval.episodes", 0, "--seed", options.seed)
        return "--steps", num_steps, "--optimizer.learning-rate", rate, *where

    batch = ("--batch-size", scale * task.batch_size, *learning(options.lesson_steps or lesson_steps, options.rates[0]))
    groups = ("--tasks", scale * task.num_tasks, "--target-success", None, *learning(steps, options.rates[1]))
    limits = ("--limits.turn-tokens", task.turn_tokens, "--limits.context-window", task.context_window)
    phases = [
        evaluation("before", *first),
        Phase.of_command("sft", *taught, "--model", *first, *batch, output=lessons),
        evaluation("after_lessons", lessons),
        Phase.of_command("train", *played, "--model", lessons, *groups, *limits, output=rewards),
        evaluation("after_rewards", rewards / "checkpoints" / f"step-{steps:06d}"),
        Phase.of_command("verify", rewards, "--deep"),
        Phase.of_command("export", rewards, export),
        Phase.of_script("check", "real_model.py", "--model", export, "--device", options.device, "--check", folder),
    ]
    if options.trl and options.task == "sums" and not is_gpu:
        sizes = ("--model", lessons, "--prompt", 20, "--json")
        replies = ("--sizes", "128x8", "--rounds", 1, "--steps", 2, "--warmup", 1, "--trl", "TRL fp32", "TRL bf16")
        rows = ("--objective", "sft", "--rows", task.batch_size, "--reply", 3, 3, "--repeats", 2)
        phases.append(Phase.of_script("grpo_step", "grpo_step.py", *sizes, *replies))
        phases.append(Phase.of_script("sft_step", "models.py", *sizes, *rows))
    return [phase for phase in phases if not options.phases or phase.name in options.phases]


def run(phase: Phase, folder: Path, record: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    """Runs a phase until its end or the deadline; returns its record, with the time of interrupted runs before it."""
    words, output = list(phase.words), folder / phase.name
    if phase.resumes and (output / "config.yaml").is_file():
        words.append("--resume")
    else:
        shutil.rmtree(output, ignore_errors=True)
    started = time.monotonic()
    with (folder / f"{phase.name}.json").open("w") as out, (folder / f"{phase.name}.log").open("w") as log:
        process = subprocess.Popen([sys.executable, *words], stdout=out, stderr=log)
        try:
            while not (end := os.wait4(process.pid, os.WNOHANG))[0]:
                if time.monotonic() > deadline_s:
                    process.terminate()  # a run writes a checkpoint
                    deadline_s = math.inf
                time.sleep(POLL_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    process.returncode = os.waitstatus_to_exitcode(end[1])
    return {
        **outcome(phase, folder),
        "command": list(phase.words),
        "exit_code": process.returncode,
        "wall_s": round(record.get("wall_s", 0.0) + time.monotonic() - started, 2),
        "cpu_s": round(record.get("cpu_s", 0.0) + end[2].ru_utime + end[2].ru_stime, 2),
        "peak_mb": max(record.get("peak_mb", 0), end[2].ru_maxrss // 1024),
    }


def outcome(phase: Phase, folder: Path) -> dict[str, Any]:
    """Returns the JSON that a phase printed, and the curve of a run by step."""
    lines = (folder / f"{phase.name}.json").read_text().splitlines()
    report: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    metrics = folder / phase.name / "metrics.jsonl"
    if metrics.is_file():
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        report["curve"] = [{name: step[name] for name in CURVE if step.get(name) is not None} for step in steps]
    return {name: value for name, value in report.items() if name not in LEFT_OUT}


def summary(record: Mapping[str, Any]) -> str:
    """Returns the last column of a phase."""
    if record["exit_code"]:
        return f"exit code {record['exit_code']}"
    if "success_interval" in record:
        low, high = record["success_interval"]
        return f"success {record['success']:.3f} [{low:.3f}, {high:.3f}] of {record['num_episodes']}"
    if curve := record.get("curve"):
        name = "success" if "success" in curve[0] else "loss"
        return f"{name} {curve[0][name]:.3f} to {curve[-1][name]:.3f} in {len(curve)} steps"
    if "max_nats" in record:
        ends = f"{record['ends']} of {record['episodes']} replies end by themselves, {record['recorded_ends']} in ours"
        return f"logprobs differ by {record['mean_nats']:.1e} nats, {record['max_nats']:.1e} at most; {ends}"
    return "passed"


def show(name: str, record: Mapping[str, Any]) -> None:
    """Prints the line of a phase."""
    numbers = f"{record['wall_s']:9,.1f}{record['cpu_s']:9,.1f}{record['peak_mb']:9,}"
    print(f"{name:14}{numbers}  {summary(record)}", flush=True)


def check(folder: Path, export: Path, device: str) -> bool:
    """Computes episodes of the last evaluation by transformers alone, prints differences, and returns if it agrees."""
    import torch  # here: the programme itself needs little memory
    from transformers import AutoModelForCausalLM

    from agentgym.rollout.record.episodes_file import read_episodes
    from agentgym.trajectory import Source

    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = AutoModelForCausalLM.from_pretrained(export, dtype=dtype).to(device).eval()
    ends = torch.tensor(model.generation_config.eos_token_id).reshape(-1).tolist()
    limit = json.loads((folder / "after_rewards" / "result.json").read_text())["turn_tokens"]
    greedy = {"max_new_tokens": limit, "do_sample": False, "pad_token_id": ends[0]}
    differences, counts = [], Counter({"episodes": 0, "ends": 0, "recorded_ends": 0})
    for episode in islice(read_episodes(folder / "after_rewards"), NUM_CHECKED):
        prompt, reply, *_ = spans = episode.trajectory.rows[0].spans
        ids_BT = torch.tensor([[token for span in spans for token in span.ids]], device=device)
        with torch.inference_mode():
            logp_TV = model(ids_BT).logits[0].float().log_softmax(-1).cpu()
            replies_BT = model.generate(ids_BT[:, : len(prompt.ids)], **greedy)
        start = 0
        for span in spans:
            if span.source is Source.POLICY:
                places = torch.arange(start, start + len(span.ids)) - 1
                differences.append((logp_TV[places, list(span.ids)] - torch.tensor(span.logprobs)).abs())
            start += len(span.ids)
        counts.update(episodes=1, ends=replies_BT[0, -1].item() in ends, recorded_ends=reply.ids[-1] in ends)
    nats = torch.cat(differences)
    print(json.dumps({"max_nats": float(nats.max()), "mean_nats": float(nats.mean()), **counts}))
    agrees = nats.mean() < BFLOAT16_NATS if dtype == torch.bfloat16 else nats.max() < FLOAT32_NATS
    return bool(agrees) and 2 * counts["ends"] >= counts["recorded_ends"]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder or a GGUF file")
    parser.add_argument("--chat-template", help="a name or a file, for a base model")
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; on a GPU, steps have four times as many rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help=f"of lessons and of GRPO; by default {STEPS}")
    parser.add_argument("--lesson-steps", type=int, default=0, help="of lessons; fewer leave more to rewards")
    parser.add_argument("--rates", nargs=2, default=["3e-5", "3e-6"], help="learning rates of lessons and of GRPO")
    parser.add_argument("--episodes", type=int, default=200, help="held-out tasks of an evaluation")
    parser.add_argument("--minutes", type=float, default=math.inf, help="the phase that runs then is interrupted")
    parser.add_argument("--phases", nargs="+", help="run these alone")
    parser.add_argument("--trl", action=argparse.BooleanOptionalAction, default=is_here("trl-1.16"), help="TRL too")
    parser.add_argument("--output", type=Path, default=Path("runs/real"))
    parser.add_argument("--check", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Runs what is missing, and prints the table."""
    options = parse(words)
    if options.check:
        return 0 if check(options.check, Path(options.model), options.device) else 1
    deadline_s = time.monotonic() + 60 * options.minutes
    options.output.mkdir(parents=True, exist_ok=True)
    if options.task == "sums":
        write_sums(options.output, options.seed)
    results = options.output / "results.json"
    report = json.loads(results.read_text()) if results.is_file() else {"phases": {}}
    report |= {name: getattr(options, name) for name in ("model", "task", "device", "seed")} | {"cores": os.cpu_count()}
    print(f"{'phase':14}{'wall s':>9}{'CPU s':>9}{'peak MB':>9}  {options.model}, {options.task}, {options.device}")
    for phase in list_phases(options):
        record = report["phases"].get(phase.name, {})
        if record and record["command"] != list(phase.words):
            sys.exit(f"{phase.name} in {options.output} was run by another command: give another --output")
        if record.get("exit_code") != 0:
            record = report["phases"][phase.name] = run(phase, options.output, record, deadline_s)
            results.write_text(json.dumps(report, indent=1) + "\n")
        show(phase.name, record)
        if record["exit_code"]:
            log = (options.output / f"{phase.name}.log").read_text()
            sys.exit(f"{log[-1500:]}\n{phase.name} did not end; the same command goes on")
    print(f"results {results}")
    return 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # either one interrupts the phase that runs
    sys.exit(main())
