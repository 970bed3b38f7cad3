"""A stream of groups: sampling continues while a step learns, as far ahead as the bound on staleness allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from agentgym.errors import ConfigError, TrainingHalted
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.hosting.gc_pause import FullCollections, young_garbage_only
from agentgym.rollout.sampling.sampler import Sampler
from agentgym.rollout.sampling.staleness import StalenessPlan
from agentgym.trajectory import Group, Trajectory
from agentgym.types import Task

__all__ = ["GroupRequest", "GroupStream", "StreamEnded", "StreamReport"]


class StreamEnded(TrainingHalted):
    """A step waited for groups that are no longer played."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A task to play and the name of its group: `GroupRequest(Task("TextGame-v0", 7), key="3/0", step=3)`."""

    task: Task
    key: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReport:
    """The waits of sampling and learning for each other since the last report."""

    groups_ahead: int
    """Groups that began and that no step has taken yet, finished or not."""
    learner_wait_s: float
    """Seconds that steps waited for groups."""
    sampling_wait_s: float
    """Seconds in which an episode could have started, but the bound on staleness kept its group back."""
    held_groups: int
    """Groups that a step needed and that were not finished when it asked for them."""


@dataclass(slots=True)
class _OpenGroup:
    """A group in which some members are still being played."""

    request: GroupRequest
    due: int
    """The last version at which a step may take it."""
    members: dict[int, Trajectory] = field(default_factory=dict)


@dataclass(slots=True)
class _Waits:
    """The waits that become a `StreamReport`."""

    learner_s: float = 0.0
    sampling_s: float = 0.0
    num_held: int = 0


class GroupStream:
    """Plays groups ahead of the steps that take them, across weight updates too (partial rollouts).

    `take` returns groups as they are finished. Unfinished ones continue, under new weights from their next token on,
    and are returned by a later call. Which groups a call returns depends on the clock; what each holds depends on the
    weights during its episodes. `requests` names the tasks; one is taken when its first episode can begin at once.
    Call `advance(version)` after every update: see `StalenessPlan` for the consequences. A group that a step needs and
    that is not finished is waited for; the limits of its episodes end that wait. A wait for groups that are no longer
    played raises.
    """

    def __init__(
        self,
        sampler: Sampler,
        requests: Iterator[GroupRequest],
        *,
        group_size: int,
        groups_per_step: int,
        max_staleness: int,
        run_seed: int = 0,
    ) -> None:
        if group_size < 1:
            raise ConfigError(f"group_size is at least 1, got {group_size}")
        self._sampler = sampler
        self._requests = requests
        self._group_size = group_size
        self._run_seed = run_seed
        self._plan = StalenessPlan(groups_per_step, max_staleness)
        self._open: dict[str, _OpenGroup] = {}
        self._waiting: deque[Episode] = deque()
        self._complete: deque[tuple[Group, int]] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._failure: BaseException | None = None
        self._is_begun = False
        self._garbage = ExitStack()
        self._collections = FullCollections()
        self._end = ""
        """The reason why no further group begins; empty as long as some do."""
        self._waits = _Waits()
        self._idle_since: float | None = None

    @property
    def num_unfinished(self) -> int:
        """The number of episodes that began or wait, in groups that are not complete."""
        return sum(self._group_size - len(group.members) for group in self._open.values())

    def advance(self, version: int) -> None:
        """Counts an update: later episodes begin with policy `version`, and there is room for more of them."""
        self._plan.advance(version)
        self._collections.count_update()
        if self._is_begun:  # nothing is played before the first `take`
            self._fill()

    async def take(self, num_groups: int, earlier: Sequence[Group] = ()) -> list[Group]:
        """Returns the next `num_groups` groups, in which no token is older than `max_staleness` updates.

        A step takes `groups_per_step` first, and may then take others in place of some. Raises what the sampler raises
        if too many episodes fail, of these groups and of those that the same step took `earlier`, and StreamEnded if
        the groups that are waited for are no longer played.
        """
        if num_groups > self._plan.max_ahead:
            raise ConfigError(
                f"{num_groups} groups at once, and only {self._plan.max_ahead} can be ahead of a step: "
                "take fewer, or raise max_staleness"
            )
        if not self._is_begun:
            self._is_begun = True
            self._garbage.enter_context(young_garbage_only())
        self._fill()
        choice, started = self._plan.choose(num_groups), _now()
        self._waits.num_held += sum(group.due == self._plan.version for group in self._open.values())
        chosen_groups: list[tuple[Group, int]] = []
        passed: list[tuple[Group, int]] = []
        while len(chosen_groups) < num_groups:
            if not self._complete:
                await self._wait(f"{num_groups - len(chosen_groups)} of {num_groups} groups are missing")
                continue
            ready = self._complete.popleft()
            (chosen_groups if choice.takes(ready[1]) else passed).append(ready)
        self._waits.learner_s += _now() - started
        self._complete.extendleft(reversed(passed))
        self._plan.take([due for _, due in chosen_groups])
        groups = [group for group, _ in chosen_groups]
        before = [trajectory for group in earlier for trajectory in group.trajectories]
        self._sampler.check([trajectory for group in groups for trajectory in group.trajectories], before)
        self._fill()
        return groups

    def report(self) -> StreamReport:
        """Returns the waits since the last report."""
        self._count_idle(still=True)
        waits, self._waits = self._waits, _Waits()
        return StreamReport(
            groups_ahead=self._plan.num_ahead,
            learner_wait_s=waits.learner_s,
            sampling_wait_s=waits.sampling_s,
            held_groups=waits.num_held,
        )

    async def close(self) -> None:
        """Ends what is in flight and waits until it has cleaned up after itself.

        Before the first `take` there is nothing to end, and the stream may still be used.
        """
        if not self._is_begun:
            return
        self._end = self._end or "the stream was closed"
        workers = tuple(self._workers)
        for worker in workers:
            worker.cancel()
        if workers:
            await asyncio.wait(workers)
        self._garbage.close()

    async def _wait(self, lack: str) -> None:
        """Waits until another group is complete; raises if there will be none."""
        if self._failure is not None:
            raise self._failure
        if not self._workers:
            raise StreamEnded(f"{lack}, and no episode is being played: {self._end or 'none may begin'}")
        self._news.clear()
        await self._news.wait()

    def _fill(self) -> None:
        """Starts a worker for each episode that may begin, up to the concurrency."""
        while len(self._workers) < self._sampler.config.concurrency:
            episode = self._next_episode()
            if episode is None:
                return
            worker = asyncio.ensure_future(self._work(episode))
            self._workers.add(worker)
            worker.add_done_callback(self._note_worker_end)

    def _next_episode(self) -> Episode | None:
        """Returns the next member of the newest group, or the first one of another group if there is room."""
        if not self._waiting and not self._end:
            if not self._plan.has_room:
                self._idle_since = _now() if self._idle_since is None else self._idle_since
                return None
            self._count_idle()
            self._begin_group()
        return self._waiting.popleft() if self._waiting else None

    def _begin_group(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._end = "there are no further tasks"
            return
        self._open[request.key] = _OpenGroup(request, self._plan.begin())
        for member in range(self._group_size):
            self._waiting.append(Episode(request.task, request.key, member, self._run_seed, request.step))

    async def _work(self, first: Episode) -> None:
        """Plays one episode after the other until none may begin."""
        episode: Episode | None = first
        while episode is not None:
            trajectory = await self._sampler.play(episode)
            group = self._open[episode.group]
            group.members[episode.member] = trajectory
            if len(group.members) == self._group_size:
                del self._open[episode.group]
                members = tuple(group.members[member] for member in range(self._group_size))
                self._complete.append((Group(group.request.key, group.request.task, members), group.due))
                self._news.set()
            episode = self._next_episode()

    def _note_worker_end(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        failure: BaseException | None = None
        if not worker.cancelled():
            failure = worker.exception()
        elif not self._end:
            failure = StreamEnded("an episode was cancelled from outside, and its group can never be complete")
        self._failure = self._failure or failure
        self._news.set()

    def _count_idle(self, *, still: bool = False) -> None:
        """Adds the seconds in which the bound kept groups back; with `still`, the count continues."""
        if self._idle_since is not None:
            now = _now()
            self._waits.sampling_s += now - self._idle_since
            self._idle_since = now if still else None


def _now() -> float:
    """Returns the seconds on the event loop's clock."""
    return asyncio.get_running_loop().time()
