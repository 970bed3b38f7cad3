"""New weights by collective broadcast: the trainer is rank 0 of a process group that it shares with a server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

from agentgym.errors import EngineError

__all__ = ["WeightBroadcast"]


class WeightBroadcast:
    """Rank 0 of a process group of its own, independent of the trainer's groups.

    NCCL for tensors on a GPU (untested there), Gloo for those on CPU. `join` waits until the other ranks have joined,
    who need `address`, `port`, `group_name`.
    """

    def __init__(self, num_ranks: int, backend: str, group_name: str, timeout_s: float) -> None:
        self.address = "127.0.0.1" if backend == "gloo" else socket.gethostbyname(socket.gethostname())
        self.group_name = group_name
        self.backend = backend
        self.num_ranks = num_ranks
        self._timeout = timedelta(seconds=timeout_s)
        self._thread = ThreadPoolExecutor(1, "agentgym-broadcast")
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self.address, 0, num_ranks, True, self._timeout, wait_for_workers=False
        )
        self._group: dist.ProcessGroup | None = None

    @property
    def port(self) -> int:
        """The port of the store, for the other ranks."""
        return int(self._store.port)

    async def join(self) -> None:
        """Forms the group; raises EngineError if the others do not join in time."""
        await self._run(self._join)

    async def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcasts the tensors one by one, in order; the others receive as many of the same shapes."""
        await self._run(lambda: self._send(tensors))

    def close(self) -> None:
        """Leaves the group; a second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _join(self) -> None:
        # The public constructor makes the process's only default group, which a trainer may have or need for itself.
        group, _ = _new_process_group_helper(
            self.num_ranks,
            0,
            [],
            Backend(self.backend),
            PrefixStore(self.group_name, self._store),
            group_name=GroupName(self.group_name),
            timeout=self._timeout,
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self.num_ranks)}
        self._group = group

    def _send(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.contiguous(), src=0, group=self._group)

    async def _run(self, work: object) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)  # type: ignore[arg-type]
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"the weights could not be broadcast: {error}") from error
