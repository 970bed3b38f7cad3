"""Samples per second with replies that take log-normal times: waiting for each batch, against going on over updates.

Both play the same tasks on the same fake SGLang server with as many live episodes, send new weights after each batch
and count only the episodes of batches that were handed over. `waiting` plays a batch to its end before the update.
`going on` has more tasks in flight than a batch needs and takes the groups that are complete first; the others go on
under the new weights (partial rollouts).

    python benchmarks/long_tail.py [--batches 8] [--sigma 1.0] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rollout_http import Walk, fake_server, sglang_engine

from agentgym.chat_templates.families import renderer_for
from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Engine
from agentgym.model.model_folder import load_decoder, published_views
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.group_stream import GroupRequest, GroupStream
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.tools.calling.definition import tool
from agentgym.trajectory import Group
from agentgym.types import Task

TASKS, GROUP_SIZE = 16, 8
MEDIAN_S = 0.1
LEARN_S = 0.3
TARGET = 1.8


class LongWalk(Walk):
    """A walk of 4 to 24 turns, by its seed."""

    def start(self, options: dict[str, object]) -> str:
        """The first room."""
        self.length = 4 + int(self.np_random.integers(21))
        return super().start(options)

    @tool
    def look(self, direction: str) -> str:
        """Looks in a direction."""
        self.count += 1
        if self.count == self.length:
            self.end(success=True, reward=1.0)
        return f"To the {direction} there is a room with a lamp, a table and a closed door."


@dataclass(frozen=True)
class Score:
    """The result of one way of sampling."""

    episodes: int
    seconds: float
    stale_tokens: float
    """The share of the tokens whose weights were not the newest when their batch was handed over."""

    @property
    def rate(self) -> float:
        """Episodes per second."""
        return self.episodes / self.seconds


def requests() -> Iterator[GroupRequest]:
    """Yields tasks, without end."""
    number = 0
    while True:
        task = Task("LongWalk-v0", number)
        yield GroupRequest(task, f"{number // TASKS}/{number % TASKS}", number // TASKS)
        number += 1


class Run:
    """Batches on one engine, with an update after each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.weights = dict(published_views(load_decoder(embedded_folder())))
        loop = RolloutLoop(engine, renderer_for(embedded_folder()), Limits(max_turns=32, turn_tokens=32))
        self.sampler = Sampler(loop, lambda task: LongWalk(), SamplerConfig(concurrency=TASKS * GROUP_SIZE))
        self.version = 0
        self.num_tokens = self.num_stale = 0

    async def learn(self, groups: list[Group]) -> None:
        """Counts the batch, waits for the time of learning, and sends new weights."""
        for row in (row for group in groups for trajectory in group.trajectories for row in trajectory.rows):
            versions = row.policy_versions[row.mask]
            self.num_tokens += len(versions)
            self.num_stale += int((versions < self.version).sum())
        await self.engine.pause()
        await asyncio.sleep(LEARN_S)
        self.version += 1
        await self.engine.update_weights(self.weights, self.version)
        await self.engine.resume()

    async def waiting(self, num_batches: int) -> Score:
        """Plays every batch to its end."""
        source, started, episodes = requests(), time.perf_counter(), 0
        for batch in range(num_batches):
            tasks = [next(source).task for _ in range(TASKS)]
            groups = await self.sampler.sample(tasks, GROUP_SIZE, step=batch)
            episodes += sum(len(group.trajectories) for group in groups)
            await self.learn(groups)
        return self.score(episodes, started)

    async def going_on(self, num_batches: int) -> Score:
        """Takes as a batch the groups that are complete first."""
        stream = GroupStream(self.sampler, requests(), group_size=GROUP_SIZE, groups_per_step=TASKS, max_staleness=4)
        started, episodes = time.perf_counter(), 0
        for _ in range(num_batches):
            groups = await stream.take(TASKS)
            episodes += sum(len(group.trajectories) for group in groups)
            await self.learn(groups)
            stream.advance(self.version)
        score = self.score(episodes, started)
        await stream.close()
        return score

    def score(self, episodes: int, started: float) -> Score:
        """Returns the result since `started`."""
        return Score(episodes, time.perf_counter() - started, self.num_stale / max(1, self.num_tokens))


async def measure(name: str, num_batches: int, sigma: float) -> Score:
    """Measures one way of sampling, on a server of its own."""
    timing = ("--latency-median-s", str(MEDIAN_S), "--latency-sigma", str(sigma), "--seed", "0")
    with fake_server(*timing) as url:
        async with sglang_engine(url) as engine:
            run = Run(engine)
            score = await (run.waiting(num_batches) if name == "waiting" else run.going_on(num_batches))
            run.sampler.close()
            return score


def main() -> None:
    """Prints the table, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the latency's logarithm")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    scores = {name: asyncio.run(measure(name, arguments.batches, arguments.sigma)) for name in ("waiting", "going on")}
    print(f"batches of {TASKS} x {GROUP_SIZE} episodes of 4 to 24 turns, {TASKS * GROUP_SIZE} live at once")
    print(f"{'':<12}{'episodes':>10}{'seconds':>9}{'per second':>12}{'stale tokens':>14}")
    for name, score in scores.items():
        print(f"{name:<12}{score.episodes:>10}{score.seconds:>9.1f}{score.rate:>12.1f}{score.stale_tokens:>14.1%}")
    ratio = scores["going on"].rate / scores["waiting"].rate
    print(f"going on is {ratio:.2f} times as fast; target {TARGET}")
    if arguments.json:
        print(json.dumps({"ratio": ratio, "rates": {name: score.rate for name, score in scores.items()}}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
