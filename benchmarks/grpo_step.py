"""CPU seconds of one GRPO step: our engine and learner against TRL's GRPOTrainer, on the same model and sizes.

Both sides sample the same number of tokens from the same prompts with the same saved model (0.95 million parameters,
Qwen3 architecture), center and scale the rewards within each group, and take one AdamW step, on one thread in fp32.
TRL lives in an environment of its own that the first run makes (`trl_environment.py`). It runs twice: with the settings
that are fastest here, and with its defaults (gradient checkpointing, bf16).

Before anything is timed, TRL's first trajectories go through our learner: the gradient norms must agree.

    python benchmarks/grpo_step.py [--steps N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported, and for TRL's process

import torch
from trl_environment import run_beside_trl

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Completion, Sampling
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import load_decoder, save_model_folder
from agentgym.rollout.seeds import derive
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.batch.credits import credit_groups, flat_credit
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

TASK = Task("benchmark", 0)
TARGET = 1 / 3
WARMUP = 2
LEARNING_RATE = 1e-4
AGREEMENT = 1e-3
TRL_SCRIPT = Path(__file__).with_name("grpo_step_trl.py")


@dataclass(frozen=True)
class Size:
    """`num_prompts` groups of `group_size` replies of exactly `reply_tokens` each."""

    num_prompts: int
    group_size: int
    reply_tokens: int
    prompt_tokens: int = 32

    def __str__(self) -> str:
        return f"{self.num_prompts * self.group_size} x {self.reply_tokens}"

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of a step."""
        return self.num_prompts * self.group_size * self.reply_tokens

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Returns the same random ids for both sides."""
        rng = random.Random(0)
        return [[rng.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.num_prompts)]


SIZES = (Size(1, 8, 64), Size(4, 8, 256))


@dataclass(frozen=True)
class Cost:
    """Median CPU seconds of a step."""

    generation_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """The seconds of both."""
        return self.generation_s + self.update_s

    @classmethod
    def of(cls, generation_s: Sequence[float], update_s: Sequence[float]) -> Cost:
        """Returns medians after the warm-up."""
        return cls(statistics.median(generation_s[WARMUP:]), statistics.median(update_s[WARMUP:]))


def make_model(folder: Path) -> Decoder:
    """Makes the model of 0.95 million parameters, saved for both sides."""
    config = DecoderConfig(
        family="qwen3",
        vocab_size=2048,
        width=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_width=32,
        ffn_width=320,
        context_window=512,
        qk_norm=True,
    )
    model = Decoder(config).initialize(0)
    save_model_folder(model, folder)
    return model


def run_trl(size: Size, model: Path, vocab_size: int, steps: int, *, defaults: bool) -> dict[str, Any]:
    """Returns TRL's times, losses, gradient norms and first trajectories."""
    spec = {
        "model": str(model),
        "vocab_size": vocab_size,
        "prompts": size.prompts(vocab_size),
        "group_size": size.group_size,
        "reply_tokens": size.reply_tokens,
        "steps": steps + WARMUP,
        "learning_rate": LEARNING_RATE,
        "device": "cpu",
        "clock": "cpu",
        "bf16": defaults,
        "checkpointing": defaults,
    }
    result = run_beside_trl(TRL_SCRIPT, spec)
    assert set(result["tokens"]) == {size.num_tokens}, (
        f"TRL sampled {result['tokens']} tokens, wanted {size.num_tokens}"
    )
    return result


def reward(ids: Sequence[int]) -> float:
    """Returns the number of even ids; TRL's side counts the same."""
    return float(sum(1 - index % 2 for index in ids))


def trajectory(prompt: Sequence[int], reply: Completion, group: str, member: int) -> Trajectory:
    """Returns one reply as an episode of one turn."""
    span = TokenSpan(reply.ids, Source.POLICY, reply.logprobs, reply.policy_versions)
    return Trajectory(
        task=TASK,
        group=group,
        member=member,
        rows=(Row((TokenSpan(tuple(prompt), Source.PROMPT), span)),),
        turns=(Turn(Message("assistant", ""), reward(reply.ids), finish_reason="length"),),
        status=Status.COMPLETED,
        stop_reason=StopReason.TERMINATED,
    )


def make_learner(model: Decoder) -> Learner:
    """Makes a learner with one thread, AdamW and token-mean: TRL's settings as well."""
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=1)
    return Learner(model, LearnerConfig(threads=1), optimizer, total_steps=1_000)


async def run_ours(size: Size, model: Decoder, steps: int) -> Cost:
    """Returns CPU seconds of our generation and update; the engine is kept over all steps, as in training."""
    prompts = size.prompts(model.config.vocab_size)
    engine = LocalEngine(model, LocalEngineConfig(num_slots=size.num_prompts * size.group_size, compile=None))
    learner = make_learner(model)
    generation, update = [], []
    for step in range(steps + WARMUP):
        started = time.process_time()
        replies = await sample(engine, prompts, size, step)
        sampled = time.process_time()
        groups = [
            Group(f"{index}", TASK, tuple(trajectory(prompt, reply, f"{index}", m) for m, reply in enumerate(members)))
            for index, (prompt, members) in enumerate(zip(prompts, replies, strict=True))
        ]
        batch = build_batch(groups, credit_groups(groups, "grpo"), aggregation="token-mean")
        await engine.pause()
        stats = learner.update(batch)
        await engine.update_weights({}, step + 1)
        await engine.resume()
        generation.append(sampled - started)
        update.append(time.process_time() - sampled)
        assert batch.num_trained_tokens == size.num_tokens and stats.mismatch_max < 1e-3, stats
    await engine.close()
    learner.close()
    return Cost.of(generation, update)


async def sample(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], size: Size, step: int
) -> list[list[Completion]]:
    """Returns the replies of every group."""
    calls = [
        engine.generate(
            prompt,
            Sampling(max_tokens=size.reply_tokens, seed=derive(0, step, index, member)),
            session=f"{index}/{member}",
        )
        for index, prompt in enumerate(prompts)
        for member in range(size.group_size)
    ]
    replies = await asyncio.gather(*calls)
    for index in range(len(calls)):
        await engine.abort(f"{index // size.group_size}/{index % size.group_size}")
    return [replies[start : start + size.group_size] for start in range(0, len(replies), size.group_size)]


def grad_norm_on(first: dict[str, Any], model: Decoder) -> float:
    """Returns our gradient norm on the trajectories and advantages of TRL's first step."""
    group_of: dict[tuple[int, ...], list[int]] = {}
    for index, ids in enumerate(first["prompt_ids"]):
        group_of.setdefault(tuple(ids), []).append(index)
    learner = make_learner(model)

    def batch(logprobs: dict[int, list[float]]) -> TrainingBatch:
        groups, credits = [], []
        for number, (prompt, members) in enumerate(group_of.items()):
            made = []
            for place, index in enumerate(members):
                ids = tuple(first["completion_ids"][index])
                old = tuple(logprobs.get(index, [-1.0] * len(ids)))
                made.append(trajectory(prompt, Completion(ids, old, (0,) * len(ids), "length"), f"{number}", place))
            groups.append(Group(f"{number}", TASK, tuple(made)))
            credits.append(flat_credit(groups[-1], [float(first["advantages"][index]) for index in members]))
        return build_batch(groups, credits, aggregation="token-mean")

    ordered = [index for members in group_of.values() for index in members]
    logp = learner.logprobs(batch({})).reshape(len(ordered), -1).clamp(max=0.0)
    norm = learner.update(batch(dict(zip(ordered, logp.tolist(), strict=True)))).grad_norm
    learner.close()
    return norm


def compare(size: Size, steps: int) -> dict[str, Any]:
    """Compares one size: agreement first, then the times, interleaved so that a busy machine is busy for both."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        vocab_size = make_model(path).config.vocab_size
        trl = run_trl(size, path, vocab_size, steps, defaults=False)
        theirs, norm = trl["grad_norms"][0], grad_norm_on(trl["first"], load_decoder(path))
        assert abs(norm / theirs - 1) < AGREEMENT, f"gradient norm {norm} of ours against TRL's {theirs}"
        ours = asyncio.run(run_ours(size, load_decoder(path), steps))
        default = run_trl(size, path, vocab_size, steps, defaults=True)
    return {
        "size": str(size),
        "ours": ours,
        "trl": Cost.of(trl["generation_s"], trl["update_s"]),
        "trl_defaults": Cost.of(default["generation_s"], default["update_s"]),
        "grad_norms": (norm, theirs),
    }


def main() -> None:
    """Prints the table, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=7, help="timed steps a side, after two for warming up")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    print(f"{'size':<10}{'':<16}{'generate s':>11}{'update s':>10}{'total s':>9}{'ratio':>8}   gradient norm")
    for size in SIZES:
        result = compare(size, arguments.steps)
        names = {"ours": "ours", "trl": "TRL, fastest", "trl_defaults": "TRL, defaults"}
        for key, name in names.items():
            cost, ratio = result[key], result["ours"].total_s / result[key].total_s
            norm = {"ours": f"{result['grad_norms'][0]:.6f}", "trl": f"{result['grad_norms'][1]:.6f}"}.get(key, "")
            times = f"{cost.generation_s:>11.3f}{cost.update_s:>10.3f}{cost.total_s:>9.3f}"
            print(f"{result['size']:<10}{name:<16}{times}{ratio:>8.2f}   {norm}", flush=True)
        found.append({**result, **{key: asdict(result[key]) for key in names}})
    print(f"ratio: our total over that line's; the target is at most {TARGET:.2f}")
    if arguments.json:
        print(json.dumps({"sizes": found}))


if __name__ == "__main__":
    main()
