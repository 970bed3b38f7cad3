"""The scheduler alone, up to 100,000 episodes at once: real stream and sampler, simulated replies, simulated time.

Replies take log-normal seconds of a clock that jumps, so what is left on the real one is what scheduling costs. The
first table has samples per simulated second by max_staleness, with how old the tokens were that steps learned from. The
second has the CPU seconds of an episode by the number of live ones, and how they grow: all of them, those of the same
replies and environments without a scheduler, and the difference, which is the scheduler's; also how many calls of
functions the scheduler makes for an episode, which no cache changes. All sizes play the same steps, of 25,000 episodes,
and nothing ever keeps an episode from beginning: so many are live from the first that counts to the last.

    python benchmarks/simulate.py [--steps 40] [--live 1000 10000 100000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from simulated import (
    ENV_ID,
    LogNormalSeconds,
    SimulatedEngine,
    SimulatedEnv,
    simulated_sampler,
)
from virtual_time import run_in_virtual_time

from agentgym.engines.protocol import Sampling
from agentgym.rollout.hosting.gc_pause import young_garbage_only
from agentgym.rollout.sampling.group_stream import GroupRequest, GroupStream
from agentgym.rollout.sampling.sampler import Sampler
from agentgym.trajectory import Group
from agentgym.types import Task

GROUP_SIZE = 8
TARGET = 1.8
STEP = 25_000
"""The episodes of a step where costs are measured, and the least that they are measured over."""
MEDIAN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run to simulate."""

    max_staleness: int
    """0 plays each step to its end before it learns."""
    tasks: int = 16
    steps: int = 40
    live: int = 128
    """The number of episodes at once."""
    turns: int = 4
    sigma: float = 1.0
    """The spread of the logarithm of a reply's seconds, whose median is 1."""
    learn_s: float = 4.0
    """Simulated seconds of learning."""
    push_s: float = 0.5
    """Simulated seconds of a weight update, in which nothing is sampled."""
    counts_ages: bool = True
    """False leaves `Score.ages` empty, so that counting is not part of a run's cost."""


@dataclass
class Score:
    """The result of a scenario."""

    episodes: int = 0
    """The number of episodes of the steps."""
    simulated_s: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)
    """The number of trained tokens by their age in updates."""
    learner_wait_s: float = 0.0
    sampling_wait_s: float = 0.0
    held_groups: int = 0

    @property
    def rate(self) -> float:
        """Episodes per simulated second."""
        return self.episodes / self.simulated_s


def requests(tasks: int) -> Iterator[GroupRequest]:
    """Yields tasks, without end."""
    for number in count():
        yield GroupRequest(Task(ENV_ID, number), f"{number // tasks}/{number % tasks}", number // tasks)


class Simulation:
    """A training run without a learner and a model."""

    def __init__(self, scenario: Scenario, sampler: Sampler, engine: SimulatedEngine) -> None:
        self.scenario = scenario
        self.sampler = sampler
        self.engine = engine
        self.score = Score()
        self.version = 0

    async def run(self) -> Score:
        """Plays all steps; the clocks run from the first episode to the last update."""
        gc.collect()
        clock, started = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        await (self.ahead() if self.scenario.max_staleness else self.in_turn())
        self.score.simulated_s = clock() - started
        self.sampler.close()
        return self.score

    async def in_turn(self) -> None:
        """Plays a step, learns, updates."""
        source = requests(self.scenario.tasks)
        for step in range(self.scenario.steps):
            tasks = [next(source).task for _ in range(self.scenario.tasks)]
            await self.learn(await self.sampler.sample(tasks, GROUP_SIZE, step=step))

    async def ahead(self) -> None:
        """Learns while the groups of later steps are played."""
        stream = GroupStream(
            self.sampler,
            requests(self.scenario.tasks),
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
        """Counts the groups, and waits for the time of a step."""
        self.score.episodes += sum(len(group.trajectories) for group in groups)
        for trajectory in (
            trajectory for group in groups for trajectory in group.trajectories if self.scenario.counts_ages
        ):
            for span in trajectory.rows[0].spans:
                self.score.ages.update(self.version - version for version in span.policy_versions or ())
        await asyncio.sleep(self.scenario.learn_s)
        await self.engine.pause()
        await asyncio.sleep(self.scenario.push_s)
        self.version += 1
        await self.engine.update_weights({}, self.version)
        await self.engine.resume()


class Lap:
    """The cost of episodes from the beginning of one episode to that of a later one.

    Each episode that begins then takes the place of one that ended: the first ones begin together, and cost more.
    `calls` counts calls of Python functions instead of CPU seconds, which takes seconds of its own.
    """

    def __init__(self, live: int, episodes: int, *, calls: bool = False) -> None:
        self.episodes = episodes
        self._at = (2 * live, 2 * live + episodes)
        self._episode_numbers = count(1)
        self._profile = cProfile.Profile(builtins=False) if calls else None
        self._times: list[float] = []

    def begin(self) -> None:
        """Counts an episode."""
        if next(self._episode_numbers) not in self._at:
            return
        if self._profile is not None and not self._times:
            self._profile.enable()
        elif self._profile is not None:
            self._profile.disable()
        self._times.append(time.process_time())

    @property
    def cpu_us(self) -> float:
        """The CPU microseconds of an episode."""
        first, last = self._times
        return 1e6 * (last - first) / self.episodes

    @property
    def calls(self) -> float:
        """The calls and resumptions of functions, for an episode."""
        assert self._profile is not None
        return sum(entry.callcount for entry in self._profile.getstats()) / self.episodes


def simulate(scenario: Scenario, lap: Lap | None = None) -> Score:
    """Simulates one run in simulated time."""

    async def run() -> Score:
        def make(task: Task) -> SimulatedEnv:
            if lap is not None:
                lap.begin()
            return SimulatedEnv(scenario.turns)

        seconds = LogNormalSeconds(MEDIAN_S, scenario.sigma)
        sampler, engine = await simulated_sampler(seconds, make=make, concurrency=scenario.live)
        return await Simulation(scenario, sampler, engine).run()

    return run_in_virtual_time(run())


def by_staleness(steps: int) -> dict[int, Score]:
    """Prints the first table."""
    scores = {bound: simulate(Scenario(max_staleness=bound, steps=steps)) for bound in (0, 1, 2, 4, 8)}
    ages = range(9)
    names = f"{'max_staleness':<15}{'episodes/s':>11}{'ratio':>7}{'learner waits':>15}{'sampling waits':>16}{'held':>6}"
    print(f"{steps} steps of 16 x {GROUP_SIZE} episodes of 4 log-normal replies (sigma 1), 128 live at once")
    print(f"{names}   tokens by age: " + "".join(f"{age:>6}" for age in ages))
    for bound, score in scores.items():
        total = sum(score.ages.values())
        shares = "".join(f"{score.ages[age] / total:>6.0%}" if score.ages[age] else f"{'':>6}" for age in ages)
        waits = f"{score.learner_wait_s / score.simulated_s:>15.0%}{score.sampling_wait_s / score.simulated_s:>16.0%}"
        waits_text = f"{waits}{score.held_groups:>6}" if bound else f"{'':>37}"
        print(f"{bound:<15}{score.rate:>11.2f}{score.rate / scores[0].rate:>7.2f}{waits_text}{'':18}{shares}")
    return scores


def run_unscheduled(scenario: Scenario, lap: Lap) -> None:
    """Plays the same environments and replies, asked for in turn by as many bare tasks."""
    engine = SimulatedEngine(LogNormalSeconds(MEDIAN_S, scenario.sigma))
    numbers = iter(range(3 * scenario.live + lap.episodes))

    async def play() -> None:
        for number in numbers:
            lap.begin()
            env = SimulatedEnv(scenario.turns)
            env.reset(seed=number)
            for turn in range(scenario.turns):
                sampling = Sampling(max_tokens=2, seed=number * scenario.turns + turn)
                await engine.generate((1, 3), sampling, session="bare")
                env.step("on")
            env.close()

    async def run() -> None:
        with young_garbage_only():
            await asyncio.gather(*(play() for _ in range(scenario.live)))

    gc.collect()
    run_in_virtual_time(run())


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an episode: all of it, and the environment and the replies alone."""

    all_us: float
    unscheduled_us: float
    calls: float
    """The calls of the scheduler's functions."""

    @property
    def scheduler_us(self) -> float:
        """The CPU microseconds of the scheduler."""
        return self.all_us - self.unscheduled_us


def scenario_of(live: int) -> Scenario:
    """Returns the run that costs are measured in, with the same steps for every number of live episodes.

    Neither the learner nor the bound ever keeps an episode from beginning.
    """
    steps = 3 + (2 * live + lap_of(live)) // STEP
    return Scenario(
        max_staleness=64,
        live=live,
        tasks=STEP // GROUP_SIZE,
        steps=steps,
        turns=2,
        learn_s=0.1,
        push_s=0.05,
        counts_ages=False,
    )


def lap_of(live: int) -> int:
    """Returns the number of episodes that costs are measured over."""
    return max(live, STEP)


def laps_of(live: int, *, calls: bool = False) -> tuple[Lap, Lap]:
    """Measures a run with the scheduler and without."""
    lap, bare, scenario = Lap(live, lap_of(live), calls=calls), Lap(live, lap_of(live), calls=calls), scenario_of(live)
    score = simulate(scenario, lap)
    assert score.sampling_wait_s == 0, f"fewer than {live} episodes were live"
    run_unscheduled(scenario, bare)
    return lap, bare


def by_live(sizes: list[int], repeats: int) -> dict[int, Cost]:
    """Prints the second table. Of the rounds over all sizes the least counts: other work of the machine only adds."""
    laps = [{live: laps_of(live) for live in sizes} for _ in range(repeats)]
    print("\nan episode's CPU microseconds, and calls of the scheduler's functions")
    print(
        f"{'live episodes':<15}{'all':>9}{'without scheduler':>19}{'scheduler':>11}{'grown':>7}{'calls':>9}{'grown':>7}"
    )
    costs: dict[int, Cost] = {}
    for live in sizes:
        all_us, unscheduled_us = (min(laps_by_size[live][kind].cpu_us for laps_by_size in laps) for kind in (0, 1))
        counted, bare = laps_of(live, calls=True)
        cost = costs[live] = Cost(all_us, unscheduled_us, counted.calls - bare.calls)
        first = costs[sizes[0]]
        seconds = f"{cost.all_us:>9.1f}{cost.unscheduled_us:>19.1f}{cost.scheduler_us:>11.1f}"
        grown, more_calls = cost.scheduler_us / first.scheduler_us, cost.calls / first.calls
        print(f"{live:<15}{seconds}{grown:>7.2f}{cost.calls:>9.1f}{more_calls:>7.3f}", flush=True)
    cpu_off = off_line([cost.scheduler_us for cost in costs.values()])
    calls_off = off_line([cost.calls for cost in costs.values()])
    print(f"straight lines through 0 are within {cpu_off:.1%} of the CPU seconds, {calls_off:.1%} of the calls")
    return costs


def off_line(each: Iterable[float]) -> float:
    """Returns the share by which the best proportional line misses the farthest total, given each episode's cost."""
    lowest, highest = min(each), max(each)
    return (highest - lowest) / (highest + lowest)


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
    oldest = {bound: max(score.ages) for bound, score in scores.items()}
    print(f"max_staleness 4 is {ratio:.2f} times as fast as 0 (target {TARGET}); the oldest token by bound: {oldest}")
    costs = by_live(arguments.live, arguments.repeats) if arguments.live else {}
    if arguments.json:
        print(
            json.dumps(
                {"ratio": ratio, "oldest": oldest, "cpu_us": {live: cost.scheduler_us for live, cost in costs.items()}}
            )
        )


if __name__ == "__main__":
    main()
