"""Weights reach an engine whole and in order by each way, and the last message alone ends the update."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from agentgym.engines.weights.buckets import portions
from agentgym.engines.weights.group_address import GroupAddress
from agentgym.engines.weights.transports import UpdateEnd, weight_path
from agentgym.errors import EngineError

END = UpdateEnd(3, flush=True)
WEIGHTS = {f"w{number}": torch.full((number + 1,), float(number)) for number in range(6)}
"""4, 8, ... 24 bytes."""


class Script:
    """A receiver that keeps what came, and what it was told in which order; it refuses messages from `limit` on."""

    num_ranks = 1

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.story: list[object] = []
        self.tensors: dict[str, torch.Tensor] = {}

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        self.story.append("open")
        try:
            yield
        finally:
            self.story.append("closed")

    async def take(self, tensors: Mapping[str, torch.Tensor], end: UpdateEnd | None) -> None:
        if len(self.story) >= self.limit:
            raise EngineError("no more")
        self.story.append((list(tensors), end))
        self.tensors |= tensors

    async def read(self, folder: str, end: UpdateEnd) -> None:
        self.tensors = load_file(Path(folder) / "model.safetensors")
        self.story.append((sorted(self.tensors), end))

    async def join(self, invitation: GroupAddress) -> None:
        raise AssertionError("it was not to join")

    async def receive(self, tensors: Mapping[str, torch.Tensor], group: str, end: UpdateEnd | None) -> None:
        raise AssertionError("it has not joined")

    async def leave(self, group: str) -> None:
        raise AssertionError("it has not joined")


def whole(receiver: Script) -> bool:
    return receiver.tensors.keys() == WEIGHTS.keys() and all(
        torch.equal(receiver.tensors[name], tensor) for name, tensor in WEIGHTS.items()
    )


def test_memory_sends_messages_in_one_update_and_ends_it_with_the_last() -> None:
    receiver = Script()
    report = asyncio.run(weight_path("memory", receiver, 24).load(WEIGHTS, END))
    assert receiver.story == [
        "open",
        (["w0", "w1", "w2"], None),
        (["w3"], None),
        (["w4"], None),
        (["w5"], END),
        "closed",
    ]
    assert whole(receiver)
    assert (report.version, report.num_tensors, report.num_bytes) == (3, 6, 84)


def test_disk_is_one_message_outside_of_an_update() -> None:
    receiver = Script()
    report = asyncio.run(weight_path("disk", receiver, 24).load(WEIGHTS, END))
    assert receiver.story == [(sorted(WEIGHTS), END)]
    assert whole(receiver)
    assert (report.version, report.num_tensors, report.num_bytes) == (3, 6, 84)


def test_an_update_that_is_refused_in_its_middle_is_closed() -> None:
    receiver = Script(limit=2)
    with pytest.raises(EngineError, match="no more"):
        asyncio.run(weight_path("memory", receiver, 24).load(WEIGHTS, END))
    assert receiver.story == ["open", (["w0", "w1", "w2"], None), "closed"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 60))
def test_portions_are_all_tensors_in_order_each_as_full_as_it_may_be(sizes: list[int], max_bytes: int) -> None:
    weights = {str(number): torch.zeros(size) for number, size in enumerate(sizes)}
    parts = list(portions(weights, max_bytes))
    assert [name for part in parts for name in part] == list(weights)
    totals = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert all(total <= max_bytes or len(part) == 1 for total, part in zip(totals, parts, strict=True))
    firsts = [next(iter(part.values())).nbytes for part in parts]
    assert all(total + after > max_bytes for total, after in zip(totals, firsts[1:], strict=False))
