"""Plays thousands of episodes at once: bounded, in a fixed order, and without leaving anything running."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence

from agentgym.errors import ConfigError, EnvironmentFault, TrainingHalted
from agentgym.rollout.episode.episode import Episode, EpisodeBuilder, EpisodeEnd
from agentgym.rollout.episode.episode_loop import SURPLUS, EpisodeLoop, failed_ending
from agentgym.rollout.hosting.env_code import EnvCallTimeout
from agentgym.rollout.hosting.env_host import EnvHost, make_task_env
from agentgym.rollout.hosting.env_process import EnvProcessLost
from agentgym.rollout.hosting.env_threads import EnvThreads
from agentgym.rollout.hosting.gc_pause import young_garbage_only
from agentgym.rollout.hosting.hosted_env import Env
from agentgym.rollout.sampling.call_check import describe_missing_calls
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least
from agentgym.trajectory import Group, Status, StopReason, Trajectory
from agentgym.types import Task, ToolResult

__all__ = ["Sampler", "SamplerConfig", "TooManyFailures"]

logger = logging.getLogger(__name__)

MAX_SHOWN = 20
"""The number of distinct failures that a sampler logs."""
MAX_LEAKED_THREADS = 64
"""Calls of environments that may hang at the same time; above it the run stops, before their threads and what they hold
take the memory of the process."""
NUMBER = re.compile(r"\d+")
"""The numbers in a message, such as bytes, ports and lines: failures that differ only in these are the same."""
FAILED = (Status.ENV_ERROR, Status.ENGINE_ERROR, Status.TIMEOUT, Status.AGENT_ERROR, Status.UNPLAYED)


@config_class
class SamplerConfig:
    """The number of episodes that run at once, and the limits on failures that stop the run."""

    concurrency: int = 256
    """Live episodes."""
    env_threads: int | None = None
    """Threads that blocking environments share, each pinned to one; None gives every live environment its own."""
    env_processes: int = 0
    """Processes in which the environments run, so that one which holds the interpreter, crashes or is killed for its
    memory ends only its own process, not the run; 0 runs them in the run's own. `--env-processes N` is short for it."""
    max_failure_rate: float = 0.5
    """The share of a step's episodes that may fail (environment, engine, time-out); above it the run stops."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "concurrency", "env_threads")
        check_at_least(0, self, "env_processes")
        if self.env_processes and self.env_threads is not None:
            raise ConfigError(
                "in a process each environment has its own thread: leave env_threads or env_processes out"
            )
        if not 0.0 <= self.max_failure_rate <= 1.0:
            raise ConfigError(f"max_failure_rate is a share in [0, 1], got {self.max_failure_rate}; 1 never stops")


class _Batch:
    """The episodes of one call, on their way to trajectories."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        num_groups: int | None,
        on_episode: Callable[[Trajectory], None] | None,
        earlier: Sequence[Trajectory] = (),
    ) -> None:
        self.episodes = episodes
        self.total = len(earlier) + len(episodes)
        """The number of episodes of which a share may fail."""
        self.waiting = deque(range(len(episodes)))
        self.results: list[Trajectory | None] = [None] * len(episodes)
        self.workers: list[asyncio.Task[None]] = []
        failed = [trajectory for trajectory in earlier if trajectory.status in FAILED]
        self.num_failed = len(failed)
        self.first_failure: Trajectory | None = next(iter(failed), None)
        self._missing = Counter(episode.group for episode in episodes)
        self._num_surplus = 0 if num_groups is None else len(self._missing) - num_groups
        self._on_episode = on_episode

    def record(self, index: int, trajectory: Trajectory) -> None:
        """Records a finished episode; if it completes the last group that is needed, the rest is cancelled."""
        self.results[index] = trajectory
        if trajectory.status in FAILED:
            self.num_failed += 1
            self.first_failure = self.first_failure or trajectory
        if self._on_episode is not None:
            self._on_episode(trajectory)
        self._missing[trajectory.group] -= trajectory.status is not Status.CANCELLED
        num_incomplete = sum(missing > 0 for missing in self._missing.values()) if self._num_surplus else 0
        if self._num_surplus and num_incomplete <= self._num_surplus:
            self._num_surplus = 0
            self._cancel_rest()

    def _cancel_rest(self) -> None:
        while self.waiting:
            index = self.waiting.popleft()
            self.record(index, cancelled_trajectory(self.episodes[index]))
        for worker in self.workers:
            if worker is not asyncio.current_task():
                worker.cancel(SURPLUS)


class TooManyFailures(TrainingHalted):
    """More episodes failed than `max_failure_rate` allows."""

    played: tuple[Trajectory, ...] = ()
    """The episodes that had ended by then, failed or not."""


class Sampler:
    """Plays tasks in groups; the order of the result never depends on which episode finishes first.

    `make(task)` returns a fresh environment; it is closed after its episode, whatever happens in between. With the
    `env_host` of another sampler, both share its threads and processes, which end with the other one.
    """

    def __init__(
        self,
        loop: EpisodeLoop,
        make: Callable[[Task], Env] = make_task_env,
        config: SamplerConfig | None = None,
        env_host: EnvHost | None = None,
    ) -> None:
        self.loop = loop
        self.config = config or SamplerConfig()
        if self.config.env_processes and make is not make_task_env:
            raise ConfigError("env_processes makes environments in other processes: leave it out, or `make`")
        self._has_own_host = env_host is None
        self.env_host = env_host or EnvHost(loop.limits, EnvThreads(self.config.env_threads), self.config.env_processes)
        self._make = make
        self._failures: set[str] = set()
        self._tool_envs: set[str] = set()
        self.checks_calls = True
        """True if the first episodes are still to be searched for a valid tool call."""
        self._warned_tools: set[str] = set()
        self._warned_splits: set[str] = set()

    async def sample(
        self,
        tasks: Sequence[Task],
        group_size: int,
        *,
        step: int = 0,
        run_seed: int = 0,
        phase: str = "train",
        num_groups: int | None = None,
    ) -> list[Group]:
        """Returns one group of `group_size` episodes for each task, in the order of the tasks.

        With `num_groups` below the number of tasks (over-dispatch) it returns the first groups that are complete, still
        in the order of the tasks, and cancels the rest; which ones those are depends on the clock. Raises
        TrainingHalted if more than `max_failure_rate` of the episodes fail.
        """
        if group_size < 1:
            raise ConfigError(f"group_size is at least 1, got {group_size}")
        num_wanted = len(tasks) if num_groups is None else min(num_groups, len(tasks))
        keys = [f"{step}/{index}" for index in range(len(tasks))]
        episodes = [
            Episode(task, key, member, run_seed, step, phase)
            for task, key in zip(tasks, keys, strict=True)
            for member in range(group_size)
        ]
        played = await self.run(episodes, num_groups=num_wanted)
        groups = []
        for index, (task, key) in enumerate(zip(tasks, keys, strict=True)):
            members = tuple(played[index * group_size : (index + 1) * group_size])
            if not any(trajectory.status is Status.CANCELLED for trajectory in members):
                groups.append(Group(key, task, members))
        return groups[:num_wanted]

    async def run(
        self,
        episodes: Sequence[Episode],
        *,
        on_episode: Callable[[Trajectory], None] | None = None,
        num_groups: int | None = None,
        earlier: Sequence[Trajectory] = (),
    ) -> list[Trajectory]:
        """Returns the trajectories of `episodes`, in their order; `on_episode` gets each as soon as it is finished.

        With `num_groups`, episodes that are not needed for that many complete groups end as `cancelled`. `earlier` are
        those of the same step that were played before: the share that may fail is of both.
        """
        batch = _Batch(episodes, num_groups, on_episode, earlier)
        num_workers = min(self.config.concurrency, len(episodes))
        try:
            with young_garbage_only():
                batch.workers = [asyncio.ensure_future(self._work(batch)) for _ in range(num_workers)]
                if batch.workers:
                    await asyncio.wait(batch.workers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _finish(batch.workers)
            self._show_failures(batch.results)
        trajectories = [trajectory for trajectory in batch.results if trajectory is not None]
        try:
            for worker in batch.workers:
                if not worker.cancelled():
                    worker.result()
        except TooManyFailures as halted:
            halted.played = (*earlier, *trajectories)
            raise
        self._check_calls(trajectories)
        self._check_tools(trajectories)
        self._check_split(trajectories)
        return trajectories

    def check(self, trajectories: Sequence[Trajectory], earlier: Sequence[Trajectory] = ()) -> None:
        """Checks episodes that were played one by one as `run` does: logs failures and other warnings for the user.

        Raises TrainingHalted if more than `max_failure_rate` of them and of `earlier` failed, or too many threads hang.
        """
        self._show_failures(trajectories)
        self._check_calls(trajectories)
        self._check_tools(trajectories)
        self._check_split(trajectories)
        everything = [*earlier, *trajectories]
        failed = [trajectory for trajectory in everything if trajectory.status in FAILED]
        try:
            self._check_rate(len(failed), len(everything), failed[:1])
            self._check_leaks(failed)
        except TooManyFailures as halted:
            halted.played = tuple(everything)
            raise

    def close(self) -> None:
        """Ends the threads and processes of environments."""
        if self._has_own_host:
            self.env_host.close()

    async def _work(self, batch: _Batch) -> None:
        """Plays one episode after the other until none is waiting."""
        while batch.waiting:
            index = batch.waiting.popleft()
            episode = batch.episodes[index]
            try:
                trajectory = await self.play(episode)
            except asyncio.CancelledError as error:
                if SURPLUS not in error.args:
                    raise
                trajectory = cancelled_trajectory(episode)
            batch.record(index, trajectory)
            if trajectory.status in FAILED:
                self._check_failures(batch, trajectory)

    async def play(self, episode: Episode) -> Trajectory:
        """Plays one episode in an environment of its own, from making it to closing it.

        If its process ended, and not certainly because of it, the episode is played again from its seeds: once as
        before if it was in no call then, and at last in a process of its own, where the culprit is clear.
        """
        alone, was_lost = False, False
        while True:
            try:
                return await self._play(episode, alone)
            except EnvProcessLost as lost:
                alone, was_lost = was_lost or lost.was_in_call, True

    async def _play(self, episode: Episode, alone: bool) -> Trajectory:
        try:
            env = await self.env_host.open(self._make, episode.task, alone=alone)
        except (EnvironmentFault, EnvCallTimeout) as error:
            return EpisodeBuilder(episode).finish(failed_ending(error, episode))
        try:
            return await self.loop.play(env, episode)
        finally:
            if env.facts.wants_tools:
                self._tool_envs.add(episode.task.env_id)
            problem = await env.close()
            if problem is not None:
                logger.warning(
                    "environment %s (seed %d) did not close: %s", episode.task.env_id, episode.task.seed, problem
                )

    def _check_failures(self, batch: _Batch, trajectory: Trajectory) -> None:
        """Raises TrainingHalted if too many episodes failed, or too many threads hang."""
        self._check_rate(batch.num_failed, batch.total, [batch.first_failure or trajectory])
        self._check_leaks([trajectory])

    def _check_leaks(self, failed: Sequence[Trajectory]) -> None:
        num_leaked = self.env_host.num_leaked
        if failed and num_leaked > MAX_LEAKED_THREADS:
            raise TrainingHalted(
                f"{num_leaked} calls hang in {failed[-1].task.env_id}, more than"
                f" {MAX_LEAKED_THREADS}: make its step return, or end its waits with a time-out"
            )

    def _check_rate(self, num_failed: int, total: int, first: Sequence[Trajectory]) -> None:
        if num_failed > self.config.max_failure_rate * total:
            raise TooManyFailures(
                f"{num_failed} of {total} episodes failed, more than max_failure_rate="
                f"{self.config.max_failure_rate:g} allows. One of them: {describe_failure(first[0])}"
            )

    def _show_failures(self, trajectories: Sequence[Trajectory | None]) -> None:
        """Logs each distinct failure once per sampler, its traceback last."""
        for trajectory in trajectories:
            if trajectory is None or trajectory.status not in FAILED:
                continue
            kind = NUMBER.sub("0", str(trajectory.info.get("traceback", trajectory.error)))
            if kind not in self._failures and len(self._failures) < MAX_SHOWN:
                self._failures.add(kind)
                text = f"{describe_failure(trajectory)}\n{trajectory.info.get('traceback', '')}".rstrip()
                logger.warning("an episode failed (the same failure is not shown again): %s", text)

    def _check_calls(self, trajectories: Sequence[Trajectory]) -> None:
        """Warns, after the first episodes, if most calls of a model that has tools cannot be run."""
        if not self.checks_calls or not self._tool_envs:
            return
        self.checks_calls = False
        played = [record for record in trajectories if record.task.env_id in self._tool_envs and record.turns]
        if reason := describe_missing_calls(played):
            names = ", ".join(sorted(self._tool_envs))
            logger.warning("tool calls of the first %d episodes of %s: %s", len(played), names, reason)

    def _check_split(self, trajectories: Sequence[Trajectory]) -> None:
        """Warns, once per environment, if tasks could not be kept on their side, training or held out."""
        for env_id in dict.fromkeys(record.task.env_id for record in trajectories if record.info.get("split_failed")):
            if env_id in self._warned_splits:
                continue
            self._warned_splits.add(env_id)
            own = [record.info for record in trajectories if record.task.env_id == env_id]
            num_failed = sum(bool(info.get("split_failed")) for info in own)
            logger.warning(
                "%d of %d episodes of %s are of tasks that may be both trained on and evaluated on: there are too few"
                " tasks, or their prompts are equal (then give it a method task_identity); `agentgym env"
                " check %s` counts them",
                num_failed,
                len(own),
                env_id,
                env_id,
            )

    def _check_tools(self, trajectories: Sequence[Trajectory]) -> None:
        """Warns, once per tool, if all of its calls failed: the model sees the errors, but a user would not know."""
        results: dict[str, list[ToolResult]] = {}
        for result in (result for record in trajectories for turn in record.turns for result in turn.tool_results):
            if result.name and result.error in (None, "tool_error", "timeout"):  # a call beyond the limit may have none
                results.setdefault(result.name, []).append(result)
        for name, tool_results in results.items():
            if name not in self._warned_tools and all(result.error for result in tool_results):
                self._warned_tools.add(name)
                logger.warning(
                    "tool %r failed in all of its %d calls, and only the model saw the errors. The first: %s",
                    name,
                    len(tool_results),
                    tool_results[0].content,
                )


async def _finish(workers: Sequence[asyncio.Task[None]]) -> None:
    """Cancels what still runs, waits until it has cleaned up after itself, and retrieves every error."""
    unfinished = [worker for worker in workers if not worker.done()]
    for worker in unfinished:
        worker.cancel()
    if unfinished:
        await asyncio.wait(unfinished)
    for worker in workers:
        if not worker.cancelled():
            worker.exception()  # one error is raised; asyncio would complain that the others were never retrieved


def cancelled_trajectory(episode: Episode) -> Trajectory:
    """Returns the record of an episode that was not needed and has nothing to show."""
    reason = "enough groups were finished without it"
    return EpisodeBuilder(episode).finish(EpisodeEnd(Status.CANCELLED, StopReason.CANCELLED, reason))


def describe_failure(trajectory: Trajectory) -> str:
    """Returns a text with the failed episode, its error, and how to replay it."""
    task, info = trajectory.task, trajectory.info
    replay = f"\nreplay: {info['replay']}" if "replay" in info else ""
    return f"{task.env_id} with seed {task.seed} ended as {trajectory.status}: {trajectory.error}{replay}"
