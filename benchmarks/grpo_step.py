"""CPU seconds of one GRPO step: our engine and learner against TRL's GRPOTrainer, on the same model and sizes.

Both sides sample the same number of tokens from the same prompts with the same saved model (random weights of Qwen3's
architecture), center and scale the rewards within each group, and take one AdamW step, on one thread.

TRL lives in an environment of its own that the first run makes (`peer_environments.py`). The first round tries it as it
comes (gradient checkpointing, bf16) and with settings that may be faster: without checkpointing in fp32 and in bf16,
alone, with torch.compile, and with a static cache. Later rounds, ours and theirs in turn, take the fastest of a dtype.
A round is the median of its steps; the table has minimum, median and maximum of the rounds. Ours computes what
`agentgym train` does: its engine's step is compiled in fp32 where a C++ compiler is found.

Before anything is timed, TRL's first trajectories go through our learner: the gradient norms must agree in fp32.

    python benchmarks/grpo_step.py [--models 1M 60M 500M] [--prompt 1000] [--rounds N] [--steps N] [--json]
    python benchmarks/grpo_step.py --model FOLDER --sizes 128x8
    python benchmarks/grpo_step.py --models 500M --trl "TRL fp32" "TRL bf16, compile" --warmup 1 --steps 1
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported, and for TRL's process

import torch
from peer_environments import run_beside_trl
from shapes import SHAPES

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Completion, Sampling
from agentgym.model.language_model import LanguageModel
from agentgym.model.policy import load_policy
from agentgym.rollout.seeds import derive
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.batch.credits import credit_groups, flat_credit
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

TASK = Task("benchmark", 0)
LEARNING_RATE = 1e-4
AGREEMENT = 1e-3
WINDOW = 2048
TRL_SCRIPT = Path(__file__).with_name("grpo_step_trl.py")


@dataclass(frozen=True)
class Size:
    """`num_prompts` groups of `group_size` replies of exactly `reply_tokens` each."""

    num_prompts: int
    group_size: int
    reply_tokens: int
    prompt_tokens: int = 32
    """Those of a prompt, which the replies of a group share."""

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


SIZES = {"8x64": Size(1, 8, 64), "32x256": Size(4, 8, 256), "128x8": Size(16, 8, 8)}


class TrlSettings(NamedTuple):
    """Settings of TRL that change its speed and nothing else, except for rounding."""

    bf16: bool = False
    checkpointing: bool = False
    compile: bool = False
    static_cache: bool = False

    def __str__(self) -> str:
        further = [name for name, is_on in zip(self._fields[1:], self[1:], strict=True) if is_on]
        return ", ".join(["TRL bf16" if self.bf16 else "TRL fp32", *further])


TRIED = (
    TrlSettings(),
    TrlSettings(bf16=True),
    TrlSettings(bf16=True, checkpointing=True),
    *(TrlSettings(bf16=bf16, static_cache=True) for bf16 in (False, True)),
    *(TrlSettings(bf16=bf16, compile=True) for bf16 in (False, True)),
)
DTYPES = ("float32", "bfloat16")


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
    def of(cls, generation_s: Sequence[float], update_s: Sequence[float], steps: int) -> Cost:
        """Returns medians of the last `steps`; those before warm up."""
        return cls(statistics.median(generation_s[-steps:]), statistics.median(update_s[-steps:]))


@dataclass(frozen=True)
class Rounds:
    """How often each side is played."""

    rounds: int
    steps: int
    warmup: int
    tried: Sequence[TrlSettings] = TRIED
    """TRL's settings in the first round."""

    @property
    def all_steps(self) -> int:
        """Steps of one round, those of the warm-up too."""
        return self.steps + self.warmup


def run_trl(size: Size, model: Path, num_steps: int, settings: TrlSettings) -> dict[str, Any]:
    """Returns TRL's times, losses, gradient norms and first trajectories."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    spec = {
        "model": str(model),
        "vocab_size": vocab_size,
        "prompts": size.prompts(vocab_size),
        "group_size": size.group_size,
        "reply_tokens": size.reply_tokens,
        "steps": num_steps,
        "learning_rate": LEARNING_RATE,
        "device": "cpu",
        "clock": "cpu",
        **settings._asdict(),
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


def make_learner(model: LanguageModel) -> Learner:
    """Makes a learner with one thread, AdamW and token-mean: TRL's settings as well."""
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=1)
    dtype = "bfloat16" if model.embed.dtype == torch.bfloat16 else "float32"
    return Learner(model, LearnerConfig(threads=1, dtype=dtype), optimizer, total_steps=1_000)


async def run_ours(size: Size, model: LanguageModel, rounds: Rounds) -> tuple[Cost, bool]:
    """Returns CPU seconds of our generation and update, and whether the engine is compiled.

    The engine is kept over all steps, as in training.
    """
    prompts = size.prompts(model.vocab_size)
    window = min(WINDOW, model.context_window)  # that of a pretrained model may be too long for so many slots
    engine = LocalEngine(model, LocalEngineConfig(num_slots=size.num_prompts * size.group_size, window=window))
    learner = make_learner(model)
    generation, update = [], []
    max_nats = 1e-3 if model.embed.dtype == torch.float32 else 0.5
    for step in range(rounds.all_steps):
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
        assert batch.num_trained_tokens == size.num_tokens and stats.mismatch_max < max_nats, stats
    await engine.close()
    learner.close()
    return Cost.of(generation, update, rounds.steps), engine.compiles


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


def grad_norm_on(first: dict[str, Any], model: LanguageModel) -> float:
    """Returns our gradient norm on the trajectories and advantages of TRL's first step."""
    group_of: dict[tuple[int, ...], list[int]] = {}
    for index, ids in enumerate(first["prompt_ids"]):
        group_of.setdefault(tuple(ids), []).append(index)
    learner = make_learner(model)

    def batch(logprobs: dict[int, list[float]]) -> TrainingBatch:
        groups, credits = [], []
        for number, (prompt, members) in enumerate(group_of.items()):
            trajectories = []
            for place, index in enumerate(members):
                ids = tuple(first["completion_ids"][index])
                old = tuple(logprobs.get(index, [-1.0] * len(ids)))
                trajectories.append(
                    trajectory(prompt, Completion(ids, old, (0,) * len(ids), "length"), f"{number}", place)
                )
            groups.append(Group(f"{number}", TASK, tuple(trajectories)))
            credits.append(flat_credit(groups[-1], [float(first["advantages"][index]) for index in members]))
        return build_batch(groups, credits, aggregation="token-mean")

    ordered = [index for members in group_of.values() for index in members]
    logp = learner.logprobs(batch({})).reshape(len(ordered), -1).clamp(max=0.0)
    norm = learner.update(batch(dict(zip(ordered, logp.tolist(), strict=True)))).grad_norm
    learner.close()
    return norm


def compare(size: Size, model: Path, rounds: Rounds) -> dict[str, list[Cost]]:
    """Compares one size: agreement first, then the times in turn, so that a busy machine is busy for both."""
    costs: dict[str, list[Cost]] = {}
    agrees = False
    settings = rounds.tried
    for number in range(rounds.rounds):
        for dtype in DTYPES:
            cost, is_compiled = asyncio.run(run_ours(size, load_policy(model, dtype=dtype), rounds))
            name = f"ours {'bf16' if dtype == 'bfloat16' else 'fp32'}{', compiled engine' if is_compiled else ''}"
            costs.setdefault(name, []).append(cost)
        for tried in settings:
            try:
                theirs_now = run_trl(size, model, rounds.all_steps, tried)
            except SystemExit as error:
                print(f"    {tried} fails: {str(error).splitlines()[-1][:120]}", flush=True)
                continue
            if not (number or tried.bf16 or agrees):
                agrees = True
                theirs, norm = theirs_now["grad_norms"][0], grad_norm_on(theirs_now["first"], load_policy(model))
                assert abs(norm / theirs - 1) < AGREEMENT, f"gradient norm {norm} of ours against TRL's {theirs}"
                print(f"    gradient norms: {norm:.6f} of ours, {theirs:.6f} of TRL's", flush=True)
            costs.setdefault(str(tried), []).append(
                Cost.of(theirs_now["generation_s"], theirs_now["update_s"], rounds.steps)
            )
        if not number:
            settings = [fastest(costs, bf16=bf16) for bf16 in (False, True)]
    return costs


def fastest(costs: Mapping[str, Sequence[Cost]], *, bf16: bool) -> TrlSettings:
    """Returns the settings of TRL in this dtype whose first round took the fewest seconds."""
    tried = [settings for settings in TRIED if settings.bf16 == bf16 and str(settings) in costs]
    return min(tried, key=lambda settings: costs[str(settings)][0].total_s)


def spread(values: Sequence[float]) -> str:
    """Returns minimum, median and maximum."""
    return " / ".join(f"{value:.3g}" for value in (min(values), statistics.median(values), max(values)))


def show(costs: Mapping[str, Sequence[Cost]]) -> None:
    """Prints the table of one size."""
    ours = [cost for name, cost in costs.items() if name.startswith("ours")]
    best = [min(each, key=lambda cost: cost.total_s) for each in zip(*ours, strict=True)]
    print(f"    {'':38}{'generate s':>26}{'update s':>26}{'total s':>26}{'ours is, total':>26}{'update':>26}")
    for name, side_costs in costs.items():
        own = best if name.startswith("ours") else _same_dtype(costs, name)
        pairs = list(zip(own, side_costs, strict=False))
        columns = [
            spread([getattr(cost, f"{part}_s") for cost in side_costs]) for part in ("generation", "update", "total")
        ]
        if not name.startswith("ours"):
            columns += [spread([mine.total_s / cost.total_s for mine, cost in pairs])]
            columns += [spread([mine.update_s / cost.update_s for mine, cost in pairs])]
        print(f"    {name:38}" + "".join(f"{column:>26}" for column in columns), flush=True)
    theirs = [costs[str(fastest(costs, bf16=bf16))] for bf16 in (False, True)]
    ratios = [mine.total_s / min(cost.total_s for cost in each) for mine, *each in zip(best, *theirs, strict=True)]
    print(f"    our fastest over TRL's fastest, whole step: {spread(ratios)}", flush=True)


def _same_dtype(costs: Mapping[str, Sequence[Cost]], name: str) -> Sequence[Cost]:
    return next(side_costs for own, side_costs in costs.items() if own.startswith("ours " + name.split()[1].strip(",")))


def main() -> None:
    """Prints the tables, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["1M"])
    parser.add_argument("--model", help="a model folder, in place of the random ones")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["8x64", "32x256"], help="replies x tokens")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt that a group shares")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    names = [str(settings) for settings in TRIED]
    parser.add_argument("--trl", nargs="+", choices=names, default=names, help="settings to try, of both dtypes")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tried = [settings for settings in TRIED if str(settings) in arguments.trl]
    if {settings.bf16 for settings in tried} != {False, True}:
        parser.error("--trl: settings of both dtypes are needed")
    rounds = Rounds(arguments.rounds, arguments.steps, arguments.warmup, tried)
    report = {}
    for model, name in product([arguments.model] if arguments.model else arguments.models, arguments.sizes):
        size = replace(SIZES[name], prompt_tokens=arguments.prompt)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(arguments.model or Path(temporary, "model"))
            if not arguments.model:
                replace(SHAPES[model], context_window=WINDOW).save(folder)
            print(f"{model}, {size} tokens, prompts of {arguments.prompt}", flush=True)
            costs = compare(size, folder, rounds)
        show(costs)
        report[f"{model} {name}"] = {side: [asdict(cost) for cost in each] for side, each in costs.items()}
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
