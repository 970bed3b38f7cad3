"""Deals tasks out, epoch after epoch, in an order that nothing but the seed and the tasks decide."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from agentgym.data.digest import data_digest, task_digest
from agentgym.errors import ConfigError
from agentgym.types import JSON, Task

__all__ = ["TaskLoader"]


class TaskLoader:
    """Gives the next tasks; goes on after `load(state())` exactly as it would have.

    An epoch has every task once, in an order of its own, which depends on the seed, the epoch's number and what the
    tasks are: not on the order of the files, nor on who asks for how many. Without `shuffle` it is the order given.
    What is left of an epoch when less is left than was asked for is given first, and the rest comes from the next.
    """

    def __init__(self, tasks: Sequence[Task], seed: int = 0, shuffle: bool = True) -> None:
        if not tasks:
            raise ConfigError("a TaskLoader deals out at least one task, got none")
        self.tasks = tuple(tasks)
        self.seed = seed
        self.shuffle = shuffle
        self.data = data_digest(self.tasks, ordered=not shuffle)
        """Names the tasks, and their order where it counts."""
        self._digests = [task_digest(task) for task in self.tasks] if shuffle else []
        self._begin(0)

    def __len__(self) -> int:
        """Tasks in an epoch."""
        return len(self.tasks)

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next task is from."""
        return self._epoch + (self._position == len(self.tasks))

    def take(self, num_tasks: int) -> tuple[Task, ...]:
        """The next `num_tasks` tasks; more than an epoch has is more than one epoch."""
        if num_tasks < 0:
            raise ConfigError(f"take gives 0 tasks or more, got {num_tasks}")
        taken: list[Task] = []
        while len(taken) < num_tasks:
            if self._position == len(self.tasks):
                self._begin(self._epoch + 1)
            indices = self._order[self._position : self._position + num_tasks - len(taken)]
            taken += [self.tasks[index] for index in indices]
            self._position += len(indices)
        return tuple(taken)

    def state(self) -> dict[str, JSON]:
        """Where it stands, as JSON, and which tasks it deals out."""
        return {
            "data": self.data,
            "num_tasks": len(self.tasks),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load(self, state: Mapping[str, JSON]) -> None:
        """Goes to where `state` was; raises ConfigError for the state of other tasks, seeds or orders."""
        mine = self.state()
        if missing := [name for name in mine if name not in state]:
            raise ConfigError(f"this is no state of a TaskLoader: it has no {', '.join(missing)}")
        if state["data"] != self.data and state["shuffle"] == self.shuffle:
            raise ConfigError(
                f"the state is that of {state['num_tasks']} other tasks, and there are {len(self.tasks)} here: the data"
                " changed. Resume with the files and settings of the run, or begin a new one"
            )
        for name in ("shuffle", "seed"):
            if state[name] != mine[name]:
                raise ConfigError(f"the state has {name}={state[name]}, and this loader {name}={mine[name]}")
        epoch, position = state["epoch"], state["position"]
        if not (isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 <= position <= len(self.tasks)):
            raise ConfigError(f"a state has an epoch and a position in it, got {epoch!r} and {position!r}")
        self._begin(epoch)
        self._position = position

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order: Sequence[int] = range(len(self.tasks))
        if self.shuffle:  # equal tasks are equal: which of them comes first makes no difference
            self._order = sorted(self._order, key=lambda index: self._rank(epoch, index))

    def _rank(self, epoch: int, index: int) -> bytes:
        return hashlib.sha256(f"{self.seed}/{epoch}/{self._digests[index]}".encode()).digest()
