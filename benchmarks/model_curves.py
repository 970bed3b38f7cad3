"""Four architectures learn TextGame-v0 by the same commands: one picture and one table.

A small random model is made in the shape of each, with the tokenizer of the embedded model. `agentgym sft` teaches it
the format and the game: calls that do something, of a random player, then those of a good one, and at last careless
ones. `agentgym train` does the rest. What is finished is not run again, and what was cut off goes on.

    python benchmarks/model_curves.py [--models llama qwen3_moe ...] [-- --tasks 8 --practice.filter reward]

What is behind `--` goes to every `agentgym train`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from training_runs import Result, Run, draw, show
from transformers import AutoConfig, AutoModelForCausalLM

from agentgym.embedded import embedded_folder

COMMON: Mapping[str, Any] = {
    "vocab_size": 1984,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,  # with less, models without norms of queries and keys learn to copy late
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192},
    "gemma3_text": {"sliding_window": 64, "query_pre_attn_scalar": 32},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
"""The shapes of Llama 3.2, Qwen3-MoE, Gemma 3 and Qwen3.5, by their `model_type`."""
ENV = ("--env", "TextGame-v0")
LESSONS: tuple[tuple[str, ...], ...] = (
    ("--policy", "random", "--mistakes", "0", "--batch-size", "4", "--steps", "500"),
    ("--batch-size", "4", "--steps", "1200"),
    ("--batch-size", "4", "--steps", "1200", "--seed", "1"),
    (
        *("--mistakes", "0.38", "--learn-mistakes", "--steps", "300", "--seed", "2"),
        *("--optimizer.name", "adamw", "--optimizer.learning-rate", "3e-4", "--optimizer.warmup-steps", "10"),
    ),
)
"""The options of `agentgym sft`: calls of things that are there, which need copying, good play in two parts, and then
careless play, which leaves something to do for `agentgym train`."""
TARGET = 0.9


def make_model(model_type: str, folder: Path) -> float:
    """Saves a random model with the embedded tokenizer; returns its parameters in millions."""
    tokens = json.loads((embedded_folder() / "generation_config.json").read_text())
    special = {name: value for name, value in tokens.items() if name.endswith("token_id")}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **COMMON, **SHAPES[model_type], **special)
    model = AutoModelForCausalLM.from_config(config).float()
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            draw_time_steps(module.dt_bias)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(embedded_folder() / name, folder / name)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


@torch.no_grad()
def draw_time_steps(dt_bias: Tensor) -> None:
    """Draws the time steps of linear attention between 0.001 and 0.1, as those who train such models do.

    That is the initialization of Mamba 2 and of Gated DeltaNet. The one of transformers, made to be overwritten by a
    checkpoint, has states that forget everything from one token to the next.
    """
    min_log, max_log = math.log(1e-3), math.log(0.1)
    step = torch.exp(min_log + (max_log - min_log) * torch.rand_like(dt_bias))
    dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # whose softplus is the step


def teach(model_type: str, folder: Path, threads: int) -> Path:
    """Returns the folder of the model after all lessons, which are given where they were not yet."""
    model = folder / f"{model_type}-random"
    if not model.is_dir():
        print(f"{model_type}: {make_model(model_type, model):.2f} million parameters", flush=True)
    for number, lesson in enumerate(LESSONS, 1):
        taught = folder / f"{model_type}-lesson{number}"
        if not (taught / "finished").is_file():
            shutil.rmtree(taught, ignore_errors=True)
            command = [sys.executable, "-m", "agentgym", "sft", *ENV, *lesson, "--model", str(model)]
            started = time.monotonic()
            with (folder / f"{taught.name}.log").open("w") as log:
                command += ["--threads", str(threads), "--eval.episodes", "0", "--output", str(taught)]
                subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
            (taught / "finished").write_text(f"{time.monotonic() - started:.0f} s\n")
            print(f"{taught}: {time.monotonic() - started:.0f} s", flush=True)
        model = taught
    return model


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments; those after `--` are `rest`."""
    split = list(words).index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--seed", type=int, default=0, help="of `agentgym train`")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of learning")
    parser.add_argument("--output", type=Path, default=Path("runs/models"))
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args(list(words)[:split])
    arguments.rest = tuple(list(words)[split + 1 :])
    return arguments


def main() -> None:
    """Plays what is missing, then prints the table and draws the picture."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, its children too
    command = parse(sys.argv[1:])
    command.output.mkdir(parents=True, exist_ok=True)
    results = []
    for name in command.models:
        model = teach(name, command.output, command.threads)
        options = (*ENV, "--model", str(model), "--learner.threads", str(command.threads), "--seed", str(command.seed))
        run = Run(name, command.seed, (*options, *command.rest), command.output / name)
        result = Result(name)
        results.append(result)
        result.play(run)
    show(results, TARGET)
    draw(results, TARGET, command.output / "curves.png")
    print(f"curves {command.output / 'curves.png'}")
    if command.json:
        print(json.dumps({"results": [result.to_json(TARGET) for result in results]}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")
