"""How CPU seconds grow with the tokens of an episode and with the number of episodes, and the exponent of each curve.

Five parts: the rollout loop (a scripted engine that answers at once, `Walk` of `rollout.py`), the writing of its
records, `agentgym verify` of them with the renderer, the scheduler of the in-process engine without its model, and an
update of the learner (by default of 1 million parameters; while tokens grow, of two rows). An exponent of 1 is a
straight line; the fit is that of the logarithms over all sizes. Attention's operations grow with the square of the
tokens: the last line has the learner's exponent over the operations of all its matrix products, and the last column the
seconds that these would take at the speed of one large product.

    python benchmarks/growth.py [--size 1M] [--tokens 1024 ... 32768] [--episodes 16 ... 4096] [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
import torch
from models import Rows, make_learner
from rollout import REPLY, Walk, make_renderer
from shapes import SHAPES

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.scheduler import SamplingRequest, Scheduler
from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.model.decoder import Decoder
from agentgym.model.decoder_config import DecoderConfig
from agentgym.rollout.episode.replies import reply_ids
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trajectory import Trajectory
from agentgym.types import Task

TOKENS = [1 << power for power in range(10, 16)]
EPISODES = [1 << power for power in range(4, 13)]
FEW_EPISODES, FEW_TOKENS = 16, 256
"""The number of episodes while their tokens grow, and the tokens of each while their number grows."""
GROUP, SLOTS, PROMPT = 8, 256, 32
SHAPE = DecoderConfig(
    family="llama",
    vocab_size=64,
    width=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_width=8,
    ffn_width=8,
    context_window=1 << 16,
)
LEARNED_ROWS = 2
PARTS = ("rollout", "records", "verify", "scheduler", "learner", "products")


def num_turns_for(renderer: Renderer, num_tokens: int) -> int:
    """Returns the turns of `Walk` after which an episode has about so many tokens."""
    one_turn, three_turns = (len(play(renderer, 1, turns)[0].rows[0]) for turns in (1, 3))
    return max(1, round(1 + (num_tokens - one_turn) / ((three_turns - one_turn) / 2)))


def play(renderer: Renderer, num_episodes: int, num_turns: int) -> list[Trajectory]:
    """Plays episodes of so many turns, all at once."""
    reply = reply_ids(renderer, REPLY)
    engine = ScriptedEngine(lambda session, prompt_ids, sampling: reply, context_window=1 << 20)
    loop = RolloutLoop(engine, renderer, Limits(max_turns=num_turns + 1))
    sampler = Sampler(loop, lambda task: Walk(num_turns), SamplerConfig(concurrency=num_episodes))
    group_size = min(GROUP, num_episodes)
    tasks = [Task("Walk-v0", seed) for seed in range(num_episodes // group_size)]
    groups = asyncio.run(sampler.sample(tasks, group_size))
    sampler.close()
    return [trajectory for group in groups for trajectory in group.trajectories]


def schedule(num_requests: int, num_tokens: int) -> None:
    """Takes requests through the scheduler, with logits and draws left out."""
    cache = SlotCache(Decoder(SHAPE), min(num_requests, SLOTS), PROMPT + num_tokens)
    scheduler = Scheduler(cache, max_step_tokens=512, keep_idle_s=0.0)
    loop = asyncio.new_event_loop()
    sampling = Sampling(max_tokens=num_tokens, stop_ids=(63,), temperature=1.0)
    draws = np.random.default_rng(0)
    for number in range(num_requests):
        prompt_T = draws.integers(0, 60, PROMPT)
        future: asyncio.Future[Completion] = loop.create_future()
        scheduler.add(SamplingRequest(prompt_T, sampling, f"session-{number}", future, loop))
    left = num_requests
    while left:
        scheduler.admit()
        rows = scheduler.plan()
        number = len(rows.output_R)
        ended = scheduler.commit(rows, np.full(number, 7), np.full(number, -0.5, np.float32), 0)
        for request in ended:
            assert len(scheduler.completion(request).ids) == num_tokens
            cache.release(request.session)
        left -= len(ended)
    loop.close()


def learn(learner: Learner, num_rows: int, num_tokens: int) -> None:
    """Updates the weights by rows of which all tokens but the first two are trained."""
    draws = np.random.default_rng(0).integers(0, learner.model.vocab_size, (num_rows, num_tokens))
    advantages = tuple(float(number % 2) - 0.5 for number in range(num_rows))
    learner.update(Rows(tuple(map(tuple, draws.tolist())), 2, advantages).batch())


def operations(learner: Learner, num_rows: int, num_tokens: int) -> float:
    """Returns the multiplications and additions of an update's matrix products, forward and backward."""
    model = learner.model
    assert isinstance(model, Decoder)
    shape = model.config
    attention = 6.0 * shape.num_layers * shape.num_heads * shape.head_width * num_tokens**2
    return num_rows * (6.0 * model.num_parameters * num_tokens + attention)


def product_speed() -> float:
    """Returns the operations per CPU second of a large matrix product."""
    matrix = torch.randn(2048, 2048)
    return 2 * 2048**3 / cpu_seconds(lambda: matrix @ matrix, 5)


def cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """Returns the least CPU seconds of the repeats."""
    spent = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        spent.append(time.process_time() - started)
    return min(spent)


def measure(
    renderer: Renderer, learner: Learner, num_episodes: int, num_tokens: int, num_rows: int, repeats: int
) -> dict[str, float]:
    """Returns the CPU seconds of each part, and the learner's operations; `num_rows` is what it learns from."""
    num_turns = num_turns_for(renderer, num_tokens)
    played: list[Trajectory] = []

    def play_all() -> None:
        played[:] = play(renderer, num_episodes, num_turns)

    seconds = {"rollout": cpu_seconds(play_all, repeats)}
    with tempfile.TemporaryDirectory() as folder:
        with EpisodeWriter(folder) as writer:

            def write() -> None:
                writer.rewind(-1)
                writer.write(played, step=1)

            seconds["records"] = cpu_seconds(write, repeats)
        report = verify_run(Path(folder), renderer)
        assert report.ok, "\n".join(report.lines())
        seconds["verify"] = cpu_seconds(lambda: verify_run(Path(folder), renderer), repeats)
    seconds["scheduler"] = cpu_seconds(lambda: schedule(num_episodes, num_tokens), repeats)
    seconds["learner"] = cpu_seconds(lambda: learn(learner, num_rows, num_tokens), 1)
    products = operations(learner, num_rows, num_tokens)
    return {**seconds, "products": products / product_speed(), "operations": products}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Returns the slope of the line through the logarithms."""
    return float(np.polyfit([math.log(size) for size in sizes], [math.log(value) for value in seconds], 1)[0])


def print_curves(title: str, sizes: Sequence[int], rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Prints the seconds of each part by size and the exponents, which it returns."""
    print(f"\n{title:<26}" + "".join(f"{name:>11}" for name in PARTS))
    for size, row in zip(sizes, rows, strict=True):
        print(f"{size:>26,}" + "".join(f"{row[name]:>11.3f}" for name in PARTS), flush=True)
    slopes = {name: exponent(sizes, [row[name] for row in rows]) for name in PARTS}
    print(f"{'exponent':>26}" + "".join(f"{slopes[name]:>11.2f}" for name in PARTS))
    slopes["learner, of its operations"] = exponent(
        [row["operations"] for row in rows], [row["learner"] for row in rows]
    )
    print(f"the learner's exponent over its operations: {slopes['learner, of its operations']:.2f}")
    return slopes


def main() -> None:
    """Prints both tables, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--episodes", type=int, nargs="+", default=EPISODES)
    parser.add_argument("--size", choices=list(SHAPES), default="1M", help="the parameters of the learner's model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    logging.getLogger("agentgym").setLevel(logging.ERROR)  # `Walk` has one prompt for all tasks
    renderer = make_renderer()
    with tempfile.TemporaryDirectory() as folder:
        replace(SHAPES[options.size], context_window=max(options.tokens)).save(Path(folder))
        learner = make_learner(Path(folder), "fast", "float32")
    measure(renderer, learner, GROUP, FEW_TOKENS, GROUP, 1)
    by_tokens = [
        measure(renderer, learner, FEW_EPISODES, tokens, LEARNED_ROWS, options.repeats) for tokens in options.tokens
    ]
    slopes = print_curves(f"tokens, {FEW_EPISODES} episodes", options.tokens, by_tokens)
    by_episodes = [
        measure(renderer, learner, episodes, FEW_TOKENS, episodes, options.repeats) for episodes in options.episodes
    ]
    more = print_curves(f"episodes of {FEW_TOKENS} tokens", options.episodes, by_episodes)
    if options.json:
        print(json.dumps({"tokens": by_tokens, "episodes": by_episodes, "exponents": [slopes, more]}))


if __name__ == "__main__":
    main()
