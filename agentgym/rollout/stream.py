"""Groups as they come: more tasks are in flight than are needed, and those that are not finished go on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentgym.errors import ConfigError
from agentgym.rollout.episode import Episode
from agentgym.rollout.sampler import Sampler
from agentgym.trajectory import Group, Trajectory
from agentgym.types import Task

__all__ = ["GroupStream", "Order"]


@dataclass(frozen=True, slots=True)
class Order:
    """A task to play and what its group is called: `Order(Task("TextGame-v0", 7), key="3/0", step=3)`."""

    task: Task
    key: str
    step: int


@dataclass(slots=True)
class _OpenGroup:
    """A group of which some members are still being played."""

    order: Order
    members: dict[int, Trajectory] = field(default_factory=dict)


class GroupStream:
    """Keeps `num_open` groups of episodes in flight, over weight updates too (partial rollouts).

    `take` gives the groups that are complete first; what is unfinished then goes on, under new weights from its next
    token on, and is given by a later call. Which groups a call gives depends on the clock; what each holds, on the
    weights it met. `orders` names the tasks and is asked for one whenever there is room.
    """

    def __init__(
        self,
        sampler: Sampler,
        orders: Iterator[Order],
        *,
        group_size: int,
        num_open: int,
        run_seed: int = 0,
    ) -> None:
        if group_size < 1 or num_open < 1:
            raise ConfigError(f"group_size and num_open are at least 1, got {group_size}, {num_open}")
        self._sampler = sampler
        self._orders = orders
        self._group_size = group_size
        self._num_open = num_open
        self._run_seed = run_seed
        self._open: dict[str, _OpenGroup] = {}
        self._waiting: deque[Episode] = deque()
        self._complete: deque[Group] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def num_unfinished(self) -> int:
        """Episodes that were begun or wait, of groups that are not complete."""
        return sum(self._group_size - len(group.members) for group in self._open.values())

    async def take(self, num_groups: int, earlier: Sequence[Group] = ()) -> list[Group]:
        """The next `num_groups` complete groups; raises what the sampler raises when too many episodes fail, of these
        groups and of those that the same step took `earlier`."""
        if num_groups > self._num_open:
            raise ConfigError(f"{num_groups} groups at once, and only {self._num_open} are open: open as many or more")
        self._fill()
        while len(self._complete) < num_groups:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        groups = [self._complete.popleft() for _ in range(num_groups)]
        before = [one for group in earlier for one in group.trajectories]
        self._sampler.check([one for group in groups for one in group.trajectories], before)
        self._fill()
        return groups

    async def close(self) -> None:
        """Ends what is in flight and waits until it has cleaned up after itself."""
        workers = tuple(self._workers)
        for worker in workers:
            worker.cancel()
        if workers:
            await asyncio.wait(workers)

    def _fill(self) -> None:
        """Opens groups while there is room for them, and starts a worker for each episode up to the concurrency."""
        while len(self._open) + len(self._complete) < self._num_open:
            order = next(self._orders)
            self._open[order.key] = _OpenGroup(order)
            for member in range(self._group_size):
                self._waiting.append(Episode(order.task, order.key, member, self._run_seed, order.step))
        for _ in range(min(self._sampler.config.concurrency - len(self._workers), len(self._waiting))):
            worker = asyncio.ensure_future(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._ended)

    async def _work(self) -> None:
        while self._waiting:
            episode = self._waiting.popleft()
            trajectory = await self._sampler.play(episode)
            group = self._open[episode.group]
            group.members[episode.member] = trajectory
            if len(group.members) == self._group_size:
                del self._open[episode.group]
                members = tuple(group.members[member] for member in range(self._group_size))
                self._complete.append(Group(group.order.key, group.order.task, members))
                self._news.set()

    def _ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and worker.exception() is not None:
            self._failure = self._failure or worker.exception()
            self._news.set()
