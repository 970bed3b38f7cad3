"""New weights by collective broadcast: the trainer is rank 0 of a process group that it shares with engines."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

from agentgym.engines.weights.group_address import JOIN_S, GroupAddress
from agentgym.errors import EngineError

__all__ = ["WeightBroadcast"]


class WeightBroadcast:
    """Rank 0 of a new process group, independent of the trainer's groups, which engines may join.

    NCCL for tensors on a GPU (untested there), Gloo for those on CPU.
    """

    def __init__(self, num_ranks: int, backend: str) -> None:
        address = "127.0.0.1" if backend == "gloo" else socket.gethostbyname(socket.gethostname())
        make: Any = dist.TCPStore  # type: ignore[attr-defined]
        self._store: Any = make(address, 0, num_ranks, True, timedelta(seconds=JOIN_S), wait_for_workers=False)
        name = f"agentgym-{secrets.token_hex(4)}"
        self.invitation = GroupAddress(
            address=address, port=int(self._store.port), num_ranks=num_ranks, name=name, backend=backend
        )
        """The group, for the other ranks."""
        self._thread = ThreadPoolExecutor(1, "agentgym-broadcast")
        self._group: dist.ProcessGroup | None = None

    async def join(self) -> None:
        """Forms the group; raises EngineError if the others do not join in time."""
        await self._run(self._join)

    async def share(self, tensors: Sequence[Tensor]) -> None:
        """Broadcasts contiguous tensors one by one, in order."""
        await self._run(lambda: self._share(tensors))

    def close(self) -> None:
        """Leaves the group; a second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _join(self) -> None:
        invitation = self.invitation
        # The public constructor makes the process's only default group, which a trainer may have or need for itself.
        group, _ = _new_process_group_helper(
            invitation.num_ranks,
            0,
            [],
            Backend(invitation.backend),
            PrefixStore(invitation.name, self._store),
            group_name=GroupName(invitation.name),
            timeout=timedelta(seconds=invitation.timeout_s),
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(invitation.num_ranks)}
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
