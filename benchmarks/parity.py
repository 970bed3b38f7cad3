"""The parity gate on recorded steps in bfloat16: false halts of healthy runs, and how soon a damaged engine is found.

Trains the embedded model on TextGame-v0 in float32 with a checkpoint of every step. The engine's logprobs are those of
each step's weights in float32, the trainer's those of the same weights in bfloat16. Then the engine's are damaged: by a
temperature, by top-p, by older weights, by other ids before the reply, or in a few of the episodes. Two further healthy
engines are drawn at random, with the means that others published of large models.

A run is a start of 12 episodes and steps of `--episodes`, all drawn from the recorded step with replacement. The rule
before this one halted on a token: over ten times the start's largest difference, 0.125 at least.

    python benchmarks/parity.py [--steps 12] [--runs 200] [--episodes 64] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from agentgym.embedded import embedded_folder
from agentgym.model.language_model import LanguageModel
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import load_policy
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trainers.batch.batch import TrainingBatch, plain_batch
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.mismatch import Mismatch, MismatchSums
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.monitoring.parity import RoundedBound
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.parity import ParityConfig

START_EPISODES = 12
MEASURED = 64
"""The episodes of a recorded step whose tokens are measured."""
HEALTHY_STEPS = 5
"""The steps before a fault begins."""
RUN_STEPS = 20
"""The steps of a run, and the most that a fault is waited for."""


@dataclass(frozen=True)
class Gaps:
    """The differences of a step's tokens, in nats, by episode."""

    tokens: list[np.ndarray]

    def draw(self, random: np.random.Generator, num_episodes: int) -> Mismatch:
        """Returns the mismatch of some episodes, drawn with replacement."""
        chosen = random.integers(0, len(self.tokens), num_episodes)
        gap_M = torch.from_numpy(np.concatenate([self.tokens[number] for number in chosen]))
        return MismatchSums.of(gap_M, torch.zeros_like(gap_M), torch.ones_like(gap_M, dtype=torch.bool)).result


class Rule(Protocol):
    """A rule that halts runs."""

    def halts(self, mismatch: Mismatch) -> bool:
        """Returns whether a run ends with this comparison; the first is that of the start."""


class NewRule:
    """The rule of the root mean square."""

    def __init__(self, is_mixture: bool) -> None:
        self._bound = RoundedBound.of(ParityConfig(), is_mixture=is_mixture)

    def halts(self, mismatch: Mismatch) -> bool:
        is_over = self._bound.now.excess(mismatch) is not None
        self._bound.seen.append(mismatch.rms)
        return is_over


class OldRule:
    """The rule of a token."""

    def __init__(self, is_mixture: bool) -> None:
        self._bound: float | None = None

    def halts(self, mismatch: Mismatch) -> bool:
        if self._bound is None:
            self._bound = max(0.125, 10 * mismatch.max)
            return mismatch.mean > 0.02
        return mismatch.max > self._bound


@torch.no_grad()
def logprobs(
    model: LanguageModel, batch: TrainingBatch, *, temperature: float = 1.0, top_p: float = 1.0, shift: int = 0
) -> Tensor:
    """Returns the logprobs of the trained targets; `shift` replaces the first eight ids of each row by others."""
    ids_N = batch.ids_N.clone()
    start = 0
    for length in batch.seqlens:
        ids_N[start : start + 8] = (ids_N[start : start + 8] + shift) % model.vocab_size
        start += length
    layout = PackedLayout(batch.seqlens, ids_N=ids_N, mask_N=batch.mask_N)
    logp_MV = (model.logits(model.hidden_states(ids_N, layout)).float() / temperature).log_softmax(-1)
    logp_M = logp_MV.gather(1, batch.target_N[batch.mask_N][:, None])[:, 0]
    if top_p < 1.0:
        sorted_MV = logp_MV.exp().sort(-1, descending=True).values
        before_MV = sorted_MV.cumsum(-1) - sorted_MV
        logp_M = logp_M - (sorted_MV * (before_MV < top_p)).sum(-1).log()
    return logp_M


def record(folder: Path, steps: int) -> None:
    """Trains the embedded model, with a checkpoint of every step."""
    keep = CheckpointConfig(every=1, keep=steps + 1)
    Trainer(TrainConfig(env="TextGame-v0", steps=steps, checkpoint=keep, eval=HeldOutConfig(episodes=0)), folder).fit()


def measure(folder: Path, steps: int) -> dict[str, list[Gaps]]:
    """Returns the differences of each step, by the engine."""
    gaps_by_name: dict[str, list[Gaps]] = {}
    random = np.random.default_rng(0)
    episodes = [episode for episode in read_episodes(folder) if episode.phase == "train"]
    weights = [embedded_folder(), *(folder / "checkpoints" / f"step-{step:06d}" for step in range(1, steps))]
    engines = [load_policy(path) for path in weights]
    for step in range(2, steps + 1, 3):
        batch = plain_batch([episode.trajectory for episode in episodes if episode.step == step][:MEASURED])
        episode_M = batch.trajectory_N[batch.mask_N].numpy()
        trained_M = logprobs(load_policy(weights[step - 1], dtype=torch.bfloat16), batch)
        engine = engines[step - 1]
        sampled_M = logprobs(engine, batch)
        others = {
            "healthy": sampled_M,
            "temperature 0.9": logprobs(engine, batch, temperature=0.9),
            "temperature 0.7": logprobs(engine, batch, temperature=0.7),
            "top-p 0.9": logprobs(engine, batch, top_p=0.9),
            "weights of 1 step before": logprobs(engines[max(0, step - 2)], batch),
            "weights of 4 steps before": logprobs(engines[max(0, step - 5)], batch),
            "eight other ids": logprobs(engine, batch, shift=7),
        }
        damaged = random.random(episode_M.max() + 1) < 0.05
        others["5% of episodes garbled"] = torch.where(
            torch.from_numpy(damaged[episode_M]), sampled_M.roll(1), sampled_M
        )
        for name, other_M in others.items():
            if "before" in name and step <= int(name.split()[2]):
                continue
            gap_M = (trained_M - other_M).numpy()
            gaps_by_name.setdefault(name, []).append(
                Gaps([gap_M[episode_M == number] for number in np.unique(episode_M)])
            )
    return gaps_by_name


def lognormal_gaps(mean: float, sigma: float) -> list[Gaps]:
    """Returns differences of this mean, log-normal, with signs by chance; `sigma` is that of their logs."""
    random = np.random.default_rng(1)
    sizes = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, (256, 200)) * random.choice([-1, 1], (256, 200))
    return [Gaps(list(sizes.clip(-12, 3)))]


def play(
    rule: Callable[[bool], Rule],
    steps: tuple[list[Gaps], list[Gaps]],
    options: argparse.Namespace,
    is_mixture: bool,
) -> tuple[float, list[int]]:
    """Returns the share of starts that are refused, and of each other run the steps until it was halted.

    `steps` are those of the start and those that follow. A run that is not halted has `RUN_STEPS`.
    """
    random, refused, delays = np.random.default_rng(2), 0, []
    first, later = steps
    for _ in range(options.runs):
        gate = rule(is_mixture)
        if gate.halts(first[random.integers(len(first))].draw(random, START_EPISODES)):
            refused += 1
            continue
        for _ in range(HEALTHY_STEPS):
            gate.halts(first[random.integers(len(first))].draw(random, options.episodes))
        steps_played = (later[random.integers(len(later))].draw(random, options.episodes) for _ in range(RUN_STEPS))
        delays.append(
            next((number for number, step_gaps in enumerate(steps_played) if gate.halts(step_gaps)), RUN_STEPS)
        )
    return refused / options.runs, delays


def show(gaps_by_name: Mapping[str, list[Gaps]], options: argparse.Namespace) -> None:
    """Prints the table."""
    healthy = gaps_by_name["healthy"]
    drawn = {
        "drawn, dense, mean 0.036": lognormal_gaps(0.036, 1.0),
        "drawn, mixture, mean 0.064": lognormal_gaps(0.064, 1.5),
    }
    titles = f"{'starts refused':>15} {'halts per 1,000 steps':>22} {'found after':>12}"
    print(f"{'engine':28} {'mean':>7} {'rule':>6} {titles}")
    for name, gaps in {**gaps_by_name, **drawn}.items():
        is_healthy = name == "healthy" or name.startswith("drawn")
        mean = float(np.mean([np.abs(np.concatenate(step.tokens)).mean() for step in gaps]))
        for label, rule in (("token", OldRule), ("square", NewRule)):
            steps = (gaps if is_healthy else healthy, gaps)
            refused, delays = play(rule, steps, options, "mixture" in name)
            halted = [delay for delay in delays if delay < RUN_STEPS]
            num_steps = sum(delays) + len(halted)
            rate = f"{1000 * len(halted) / num_steps:.1f}" if num_steps and is_healthy else "-"
            when = "-" if is_healthy else after(delays)
            print(f"{name:28} {mean:7.4f} {label:>6} {refused:15.1%} {rate:>22} {when:>12}", flush=True)


def after(delays: list[int]) -> str:
    """Returns the median number of steps with the fault until the run was halted, the step that halts counted."""
    middle = sorted(delays)[len(delays) // 2]
    return f"over {RUN_STEPS}" if middle == RUN_STEPS else f"{middle + 1}"


def main() -> None:
    """Records, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of the recorded run")
    parser.add_argument("--runs", type=int, default=200, help="that are drawn for each row of the table")
    parser.add_argument("--episodes", type=int, default=64, help="of a step")
    parser.add_argument("--folder", type=Path, help="of the recorded run; played if it is not there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary, "run")
        if not folder.exists():
            record(folder, options.steps)
        show(measure(folder, options.steps), options)


if __name__ == "__main__":
    main()
