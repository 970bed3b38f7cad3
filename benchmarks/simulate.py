"""The scheduler alone, up to 100,000 episodes at once: real stream and sampler, simulated replies, simulated time.

Replies take log-normal seconds of a clock that jumps, so what is left on the real one is what scheduling costs. The
first table has samples per simulated second by max_staleness, with how old the tokens were that steps learned from. The
second has the CPU seconds of an episode by the number of live ones, and how they grow.

    python benchmarks/simulate.py [--steps 40] [--live 1000 10000 100000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from agentgym.rollout.sampler import Sampler
from agentgym.rollout.stream import GroupStream, Order
from agentgym.testing.simulated import ENV_ID, LogNormalSeconds, SimulatedEngine, SimulatedEnv, simulated_sampler
from agentgym.testing.virtual_time import run_in_virtual_time
from agentgym.trajectory import Group
from agentgym.types import Task

GROUP_SIZE = 8
TARGET = 1.8
MEDIAN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run to simulate."""

    max_staleness: int
    """0 plays each step to its end before it learns."""
    tasks: int = 16
    steps: int = 40
    live: int = 128
    """Episodes at once."""
    turns: int = 4
    sigma: float = 1.0
    """Of the logarithm of a reply's seconds, whose median is 1."""
    learn_s: float = 4.0
    """Simulated seconds of learning."""
    push_s: float = 0.5
    """Simulated seconds of a weight update, in which nothing is sampled."""


@dataclass
class Score:
    """What came of it."""

    episodes: int = 0
    """Of the steps."""
    begun: int = 0
    """Those that were still being played at the end too."""
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)
    """Trained tokens by how many updates old they were."""
    learner_wait_s: float = 0.0
    sampling_wait_s: float = 0.0
    held_groups: int = 0

    @property
    def rate(self) -> float:
        """Episodes per simulated second."""
        return self.episodes / self.simulated_s


def orders(tasks: int) -> Iterator[Order]:
    """The tasks, without end."""
    for number in count():
        yield Order(Task(ENV_ID, number), f"{number // tasks}/{number % tasks}", number // tasks)


class Simulation:
    """A training run without a learner and a model."""

    def __init__(self, scenario: Scenario, sampler: Sampler, engine: SimulatedEngine) -> None:
        self.scenario = scenario
        self.sampler = sampler
        self.engine = engine
        self.score = Score()
        self.version = 0

    async def run(self) -> Score:
        """All steps; the clocks run from the first episode to the last update."""
        gc.collect()
        clock, started, cpu = asyncio.get_running_loop().time, asyncio.get_running_loop().time(), time.process_time()
        await (self.ahead() if self.scenario.max_staleness else self.in_turn())
        self.score.simulated_s, self.score.cpu_s = clock() - started, time.process_time() - cpu
        self.sampler.close()
        return self.score

    async def in_turn(self) -> None:
        """Plays a step, learns, updates."""
        source = orders(self.scenario.tasks)
        for step in range(self.scenario.steps):
            tasks = [next(source).task for _ in range(self.scenario.tasks)]
            await self.learn(await self.sampler.sample(tasks, GROUP_SIZE, step=step))

    async def ahead(self) -> None:
        """Learns while the groups of later steps are played."""
        stream = GroupStream(
            self.sampler,
            orders(self.scenario.tasks),
            group_size=GROUP_SIZE,
            groups_per_step=self.scenario.tasks,
            max_staleness=self.scenario.max_staleness,
        )
        for _ in range(self.scenario.steps):
            await self.learn(await stream.take(self.scenario.tasks))
            stream.advance(self.version)
        report = stream.report()
        self.score.learner_wait_s, self.score.sampling_wait_s = report.learner_wait_s, report.sampling_wait_s
        self.score.held_groups = report.held_groups
        await stream.close()

    async def learn(self, groups: list[Group]) -> None:
        """Takes the groups, and the time of a step."""
        for one in (one for group in groups for one in group.trajectories):
            self.score.episodes += 1
            for span in one.rows[0].spans:
                self.score.ages.update(self.version - version for version in span.policy_versions or ())
        await asyncio.sleep(self.scenario.learn_s)
        await self.engine.pause()
        await asyncio.sleep(self.scenario.push_s)
        self.version += 1
        await self.engine.update_weights({}, self.version)
        await self.engine.resume()


def simulate(scenario: Scenario) -> Score:
    """One run in simulated time."""

    async def run() -> Score:
        begun = count()

        def make(task: Task) -> SimulatedEnv:
            next(begun)
            return SimulatedEnv(scenario.turns)

        seconds = LogNormalSeconds(MEDIAN_S, scenario.sigma)
        sampler, engine = await simulated_sampler(seconds, make=make, concurrency=scenario.live)
        score = await Simulation(scenario, sampler, engine).run()
        score.begun = next(begun) - 1
        return score

    return run_in_virtual_time(run())


def by_staleness(steps: int) -> dict[int, Score]:
    """Prints the first table."""
    scores = {bound: simulate(Scenario(max_staleness=bound, steps=steps)) for bound in (0, 1, 2, 4, 8)}
    ages = range(9)
    names = f"{'max_staleness':<15}{'episodes/s':>11}{'ratio':>7}{'learner waits':>15}{'sampling waits':>16}{'held':>6}"
    print(f"{steps} steps of 16 x {GROUP_SIZE} episodes of 4 log-normal replies (sigma 1), 128 live at once")
    print(f"{names}   tokens by age: " + "".join(f"{age:>6}" for age in ages))
    for bound, one in scores.items():
        total = sum(one.ages.values())
        shares = "".join(f"{one.ages[age] / total:>6.0%}" if one.ages[age] else f"{'':>6}" for age in ages)
        waits = f"{one.learner_wait_s / one.simulated_s:>15.0%}{one.sampling_wait_s / one.simulated_s:>16.0%}"
        told = f"{waits}{one.held_groups:>6}" if bound else f"{'':>37}"
        print(f"{bound:<15}{one.rate:>11.2f}{one.rate / scores[0].rate:>7.2f}{told}{'':18}{shares}")
    return scores


def by_live(sizes: list[int], repeats: int) -> dict[int, float]:
    """Prints the second table: all sizes play the same steps, of a quarter of their live episodes each. The least of
    the repeats counts, as whatever else the machine does only adds."""
    print(f"\n{'live episodes':<15}{'begun':>9}{'CPU s':>8}{'us an episode':>15}{'against the first':>19}")
    costs: dict[int, float] = {}
    for live in sizes:
        scenario = Scenario(max_staleness=4, live=live, tasks=max(1, live // GROUP_SIZE // 4), steps=6, turns=2)
        rounds = [[simulate(scenario) for _ in range(max(1, 20_000 // live))] for _ in range(repeats)]
        begun = sum(one.begun for one in rounds[0])
        cpu_s = min(sum(one.cpu_s for one in scores) for scores in rounds)
        costs[live] = 1e6 * cpu_s / begun
        print(
            f"{live:<15}{begun:>9}{cpu_s:>8.2f}{costs[live]:>15.1f}{costs[live] / costs[sizes[0]]:>19.2f}", flush=True
        )
    return costs


def main() -> None:
    """Prints the tables, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--live", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each size of the second table")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    scores = by_staleness(arguments.steps)
    ratio = scores[4].rate / scores[0].rate
    oldest = {bound: max(one.ages) for bound, one in scores.items()}
    print(f"max_staleness 4 is {ratio:.2f} times as fast as 0 (target {TARGET}); the oldest token by bound: {oldest}")
    costs = by_live(arguments.live, arguments.repeats) if arguments.live else {}
    if arguments.json:
        print(json.dumps({"ratio": ratio, "oldest": oldest, "cpu_us": costs}))


if __name__ == "__main__":
    main()
