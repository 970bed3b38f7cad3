"""New weights by collective broadcast: the trainer is rank 0 of a process group that it shares with engines."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

from agentgym.engines.weights.group_address import GroupAddress
from agentgym.errors import EngineError

__all__ = ["WeightBroadcast"]


class WeightBroadcast:
    """A rank of a process group of its own, independent of the trainer's groups; rank 0 sends, the others receive.

    NCCL for tensors on a GPU (untested there), Gloo for those on CPU.
    """

    def __init__(self, invitation: GroupAddress, rank: int = 0) -> None:
        self.invitation = invitation
        """The group, for the other ranks."""
        self._rank = rank
        self._thread = ThreadPoolExecutor(1, "agentgym-broadcast")
        self._store: Any = None
        self._group: dist.ProcessGroup | None = None

    @classmethod
    def begin(cls, num_ranks: int, backend: str, address: str | None = None) -> WeightBroadcast:
        """Returns rank 0 of a new group, which others may join; `address` is where they reach this process's node."""
        address = address or ("127.0.0.1" if backend == "gloo" else socket.gethostbyname(socket.gethostname()))
        name = f"agentgym-{secrets.token_hex(4)}"
        group = cls(GroupAddress(address=address, port=0, num_ranks=num_ranks, name=name, backend=backend))
        group._open_store()
        group.invitation = replace(group.invitation, port=int(group._store.port))
        return group

    async def join(self) -> None:
        """Forms the group; raises EngineError if the others do not join in time."""
        await self._run(self._join)

    async def share(self, tensors: Sequence[Tensor]) -> None:
        """Broadcasts contiguous tensors one by one, in order; ranks other than 0 overwrite theirs of these shapes."""
        await self._run(lambda: self._share(tensors))

    def close(self) -> None:
        """Leaves the group; a second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _open_store(self) -> None:
        address, is_first = self.invitation, self._rank == 0
        timeout = timedelta(seconds=address.timeout_s)
        make: Any = dist.TCPStore  # type: ignore[attr-defined]
        self._store = make(address.address, address.port, address.num_ranks, is_first, timeout, wait_for_workers=False)

    def _join(self) -> None:
        address = self.invitation
        if self._store is None:
            self._open_store()
        # The public constructor makes the process's only default group, which a trainer may have or need for itself.
        group, _ = _new_process_group_helper(
            address.num_ranks,
            self._rank,
            [],
            Backend(address.backend),
            PrefixStore(address.name, self._store),
            group_name=GroupName(address.name),
            timeout=timedelta(seconds=address.timeout_s),
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(address.num_ranks)}
        self._group = group

    def _share(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=self._group)

    async def _run(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)
            return
        except (RuntimeError, ValueError) as error:
            reason = str(error)
        # Without its cause, whose frames would keep connections open, for the end of which other ranks wait.
        raise EngineError(f"the weights could not be broadcast: {reason}")
