"""Iterates over tasks, epoch after epoch, in an order that depends only on the seed and the tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from agentgym.data.digest import data_digest, task_digest
from agentgym.errors import ConfigError
from agentgym.types import JSON, Task

__all__ = ["TaskLoader"]


class TaskLoader:
    """Returns the next tasks; after `load(state())` it continues exactly as it would have.

    An epoch has every task once, in its own order, which depends on the seed, the epoch's number and the content of the
    tasks. It does not depend on the order of the files or the sizes of the requests. Without `shuffle` it is the given
    order. Epochs form one endless stream: if an epoch has fewer tasks left than requested, the next supplies the rest.
    """

    def __init__(self, tasks: Sequence[Task], seed: int = 0, shuffle: bool = True) -> None:
        if not tasks:
            raise ConfigError("a TaskLoader deals out at least one task, got none")
        self.tasks = tuple(tasks)
        self.seed = seed
        self.shuffle = shuffle
        self.data = data_digest(self.tasks, ordered=not shuffle)
        """The digest of the tasks, and of their order without `shuffle`."""
        self.position = 0
        """The number of tasks that were taken from the stream."""
        self._digests = [task_digest(task) for task in self.tasks] if shuffle else []
        self._orders: dict[int, Sequence[int]] = {}

    def __len__(self) -> int:
        """Returns the number of tasks in an epoch."""
        return len(self.tasks)

    @property
    def epoch(self) -> int:
        """The number of the epoch that contains the next task."""
        return self.position // len(self.tasks)

    def take(self, num_tasks: int) -> tuple[Task, ...]:
        """Takes the next `num_tasks` tasks, which may be more than an epoch has."""
        if num_tasks < 0:
            raise ConfigError(f"take gives 0 tasks or more, got {num_tasks}")
        tasks = self.at(range(self.position, self.position + num_tasks))
        self.position += num_tasks
        return tasks

    def at(self, indices: range) -> tuple[Task, ...]:
        """Returns the tasks at these positions of the stream, independent of the tasks that were taken."""
        epoch_indices = (divmod(index, len(self.tasks)) for index in indices)
        return tuple(self.tasks[self._order(epoch)[index]] for epoch, index in epoch_indices)

    def state(self) -> dict[str, JSON]:
        """Returns the position and the identity of the tasks, as JSON."""
        return {
            "data": self.data,
            "num_tasks": len(self.tasks),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "position": self.position,
        }

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restores a `state`; raises ConfigError for the state of other tasks, seeds or orders."""
        mine = self.state()
        if missing := [name for name in mine if name not in state]:
            raise ConfigError(f"this is not a state of a TaskLoader: it has no {', '.join(missing)}")
        for name in ("shuffle", "seed"):
            if state[name] != mine[name]:
                raise ConfigError(f"the state has {name}={state[name]}, and this loader {name}={mine[name]}")
        if state["data"] != self.data:
            raise ConfigError(
                f"the state is that of {state['num_tasks']} other tasks, and there are {len(self.tasks)} here: the data"
                " changed. Resume with the files and settings of the run, or begin a new one"
            )
        position = state["position"]
        if not isinstance(position, int) or position < 0:
            raise ConfigError(f"a state has how many tasks were taken as its position, got {position!r}")
        self.position = position

    def _order(self, epoch: int) -> Sequence[int]:
        """Returns the indices of the tasks in the epoch's order; the orders of the last two epochs are cached."""
        if not self.shuffle:
            return range(len(self.tasks))
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            # equal tasks are equal: which of them comes first makes no difference
            self._orders[epoch] = sorted(range(len(self.tasks)), key=lambda index: self._rank(epoch, index))
        return self._orders[epoch]

    def _rank(self, epoch: int, index: int) -> bytes:
        return hashlib.sha256(f"{self.seed}/{epoch}/{self._digests[index]}".encode()).digest()
