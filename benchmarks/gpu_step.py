"""One GRPO step of a 0.6 B or 4 B model, bfloat16, on a GPU: `agentgym train`, and TRL on the same machine in one run.

Makes a folder with a model of Qwen3's shape (random weights; the tokenizer is ours, the vocabulary padded to
151,936), plays and learns TextGame-v0 with the `local` engine in the process, with SGLang too where it is installed
(then also with one that sleeps while the learner learns), and then gives TRL's GRPOTrainer the prompts of our first
step, groups of the same size and replies of the same length. A random model cannot play: an episode is one reply of
`--reply` tokens, and its even token ids are its reward.

Ours are the numbers of metrics.jsonl. TRL keeps float32 weights and computes in bfloat16, its default: `trl` without
gradient checkpointing, `trl_frugal` with. MFU of all is that of forward and backward over whole rows, three times the
forward's matrix products, over what the GPU's vendor promises.

    python benchmarks/gpu_step.py --output FOLDER                    # on a GPU: minutes
    python benchmarks/gpu_step.py --device cpu --shape tiny          # the same, small, anywhere
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peer_environments import run_beside_trl
from shapes import shape_of

from agentgym.embedded import embedded_folder
from agentgym.engines.local.config import LocalSettings
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import save_model_folder
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.rollout.sampling.sampler import SamplerConfig
from agentgym.trainers.checkpoints.checkpoint import copy_tokenizer
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.speed.peak import peak_flops
from agentgym.trainers.speed.work import forward_flops
from agentgym.trajectory import Source, Trajectory
from agentgym.types import Task

TRL_SCRIPT = Path(__file__).with_name("grpo_step_trl.py")
TRL_SIDES = ("trl", "trl_frugal")
ENGINES = ("local", "sglang", "sglang_asleep")
WARMUP = 2
COLUMNS = {
    "step_s": "step s",
    "generate_s": "play s",
    "learn_s": "learn s",
    "sync_s": "sync s",
    "sampled_tokens_per_s": "sampled/s",
    "trained_tokens_per_s": "trained/s",
    "mfu": "MFU",
    "gpu_mb": "GPU MB",
}


def even_ids(trajectory: Trajectory, task: Task) -> float:
    """Returns the share of even sampled ids: a reward that differs among random replies; TRL's side counts them."""
    ids = [token for row in trajectory.rows for span in row.spans if span.source is Source.POLICY for token in span.ids]
    return sum(1 - token % 2 for token in ids) / max(1, len(ids))


@dataclass(frozen=True)
class Job:
    """The work of all sides."""

    shape: DecoderConfig
    model: Path
    device: str
    tasks: int
    group: int
    reply: int
    steps: int
    head_kernel: str
    lora_rank: int
    sglang_python: str
    sglang_args: str

    @classmethod
    def of(cls, options: argparse.Namespace, folder: Path) -> Job:
        """Returns the job of the command line; `folder` has or gets the model."""
        sizes = (options.tasks, options.group, options.reply, options.steps + WARMUP)
        more = (options.head_kernel, options.lora_rank, options.sglang_python, options.sglang_args)
        return cls(shape_of(options.shape), folder / "model", options.device, *sizes, *more)

    def config(self, engine: str) -> TrainConfig:
        """Returns the settings of our run."""
        episodes, window = self.tasks * self.group, 1024 + self.reply
        return TrainConfig(
            env="TextGame-v0",
            model=str(self.model),
            engine=engine.removesuffix("_asleep"),
            steps=self.steps,
            tasks=self.tasks,
            group_size=self.group,
            eval=HeldOutConfig(episodes=0),
            learner=LearnerConfig(
                device=self.device,
                dtype="bfloat16",
                micro_batch_tokens=16_384,
                head_kernel=self.head_kernel,
                activation_checkpointing=self.shape.width > 2048,
                lora=LoraConfig(rank=self.lora_rank),
            ),
            optimizer=OptimizerConfig(learning_rate=1e-6),
            limits=Limits(max_turns=1, turn_tokens=self.reply, context_window=window),
            sampler=SamplerConfig(concurrency=episodes),
            local=LocalSettings(num_slots=episodes, max_step_tokens=2048),
            server=ServerConfig(
                dtype="bfloat16",
                device="auto" if self.device == "cpu" else "cuda",
                python=self.sglang_python,
                server_args=tuple(self.sglang_args.split()),
                serving=ServingSettings(sleep=engine.endswith("_asleep")),
            ),
        )

    @property
    def peak(self) -> float | None:
        """The operations a second of the device for bfloat16."""
        return peak_flops(torch.device(self.device), torch.bfloat16, 1)


def make_model(job: Job) -> None:
    """Saves random weights in bfloat16, as published checkpoints are, with the embedded model's tokenizer."""
    with torch.device(job.device):
        model = Decoder(job.shape).to(torch.bfloat16)
    generator = torch.Generator(device=job.device).manual_seed(0)
    for parameter in model.parameters():  # on the device: the CPU takes a minute for 4 B
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.02, generator)
    save_model_folder(model, job.model, dtype=torch.bfloat16)
    copy_tokenizer(embedded_folder(), job.model)


def run_ours(job: Job, engine: str, folder: Path) -> dict[str, float | None]:
    """Returns medians over the run's steps after the warm-up."""
    trainer = Trainer(job.config(engine), folder, reward=even_ids)
    trainer.fit()
    steps: list[dict[str, Any]] = list(trainer.metrics[WARMUP:])

    def middle(name: str, times: str | None = None) -> float | None:
        values = [step[name] * (step[times] if times else 1) for step in steps if step[name] is not None]
        return median(values) if values else None

    return {
        "step_s": middle("step_s"),
        "generate_s": middle("generate_share", "step_s"),
        "learn_s": middle("learn_share", "step_s"),
        "sync_s": middle("sync_share", "step_s"),
        "sampled_tokens_per_s": middle("sampled_tokens_per_s"),
        "trained_tokens_per_s": middle("trained_tokens_per_s"),
        "mfu": middle("mfu"),
        "gpu_mb": steps[-1]["peak_gpu_memory_mb"],
        "sampled_tokens": middle("trained_tokens"),
    }


def prompts_of(folder: Path, tasks: int) -> list[list[int]]:
    """Returns the prompts of the first step of a run, one for each of its tasks."""
    prompts: dict[str, list[int]] = {}
    for episode in read_episodes(folder):
        if episode.phase == "train" and episode.step == 1:
            prompts[episode.trajectory.group] = list(episode.trajectory.rows[0].spans[0].ids)
    assert len(prompts) == tasks, f"{len(prompts)} groups in step 1, {tasks} were played"
    return list(prompts.values())


def run_trl(job: Job, side: str, prompts: list[list[int]]) -> dict[str, float | None]:
    """Returns the same of TRL's trainer; it samples from the weights that it trains, so nothing is sent."""
    spec = {
        "model": str(job.model),
        "vocab_size": job.shape.vocab_size,
        "prompts": prompts,
        "group_size": job.group,
        "reply_tokens": job.reply,
        "steps": job.steps,
        "learning_rate": 1e-6,
        "device": job.device,
        "clock": "wall",
        "bf16": True,
        "checkpointing": side == "trl_frugal",
    }
    result = run_beside_trl(TRL_SCRIPT, spec)
    generate_s, learn_s = median(result["generation_s"][WARMUP:]), median(result["update_s"][WARMUP:])
    tokens = result["tokens"][-1]
    lengths = [len(prompt) + job.reply for prompt in prompts for _ in range(job.group)]
    flops, peak = 3 * forward_flops(job.shape, lengths, tokens), job.peak
    return {
        "step_s": generate_s + learn_s,
        "generate_s": generate_s,
        "learn_s": learn_s,
        "sync_s": 0.0,
        "sampled_tokens_per_s": tokens / generate_s,
        "trained_tokens_per_s": tokens / learn_s,
        "mfu": flops / peak / learn_s if peak else None,
        "gpu_mb": result["gpu_mb"],
        "sampled_tokens": tokens,
    }


def aside(options: argparse.Namespace, folder: Path, engine: str) -> dict[str, float | None]:
    """Returns the result of this file in a process of its own, with the GPU to itself."""
    arguments = ["--side", engine, "--output", str(folder)]
    names = "shape device tasks group reply steps head_kernel lora_rank sglang_python sglang_args".split()
    arguments += [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{engine} failed with exit status {done.returncode}")
    measured: dict[str, float | None] = json.loads(done.stdout.splitlines()[-1])
    return measured


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Measures all sides, a line each."""
    job = Job.of(options, folder)
    make_model(job)
    name = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else options.device
    print(f"{options.shape} on {name}: {job.tasks} groups of {job.group} replies of {job.reply} tokens, bfloat16")
    print(f"{'':12}" + "".join(f"{title:>11}" for title in COLUMNS.values()), flush=True)
    results: dict[str, dict[str, float | None]] = {}
    has_sglang = options.sglang_python or find_spec("sglang")
    for engine in options.engines or (ENGINES if has_sglang else ENGINES[:1]):
        results[engine] = show(engine, aside(options, folder, engine))
    prompts = prompts_of(folder / next(iter(results)), job.tasks)
    for side in TRL_SIDES if options.trl else ():
        results[side] = show(side, run_trl(job, side, prompts))
    report = {
        "device": name,
        "shape": options.shape,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "sides": results,
    }
    (folder / "gpu_step.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"in {folder / 'gpu_step.json'}")


def show(side: str, numbers: dict[str, float | None]) -> dict[str, float | None]:
    """Prints a line of the table, and returns its numbers."""
    cells = (
        "-" if numbers[name] is None else f"{numbers[name]:,.{0 if numbers[name] >= 100 else 3}f}" for name in COLUMNS
    )
    print(f"{side:12}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
    return numbers


def parse() -> argparse.Namespace:
    """Parses the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6B", help="tiny, 0.6B, 1.7B, 4B or 8B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tasks", type=int, default=8, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="replies to each")
    parser.add_argument("--reply", type=int, default=512, help="tokens of a reply")
    parser.add_argument("--steps", type=int, default=5, help=f"that are measured, behind {WARMUP} that are not")
    parser.add_argument("--head-kernel", choices=("torch", "liger"), default="torch", help="see learner.head_kernel")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank; 0 trains all weights")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="local, and sglang where it is installed")
    parser.add_argument("--sglang-python", default="", help="the interpreter that has SGLang, if it is not this one")
    parser.add_argument("--sglang-args", default="", help="further arguments of SGLang's server, as one word")
    parser.add_argument("--trl", action=argparse.BooleanOptionalAction, default=True, help="measure TRL too")
    parser.add_argument("--output", type=Path, help="folder of the model, the runs and gpu_step.json, kept afterwards")
    parser.add_argument("--side", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Compares, or is one side."""
    options = parse()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("torch finds no GPU here: --device cpu --shape tiny runs the same, small")
    if options.side:
        measured = run_ours(Job.of(options, options.output), options.side, options.output / options.side)
        print(json.dumps(measured))
    elif options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        compare(options, options.output)
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(options, Path(folder))


if __name__ == "__main__":
    main()
