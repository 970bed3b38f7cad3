"""Weights by broadcast: real groups of processes, and who is asked to join them."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("ray", reason="Ray is not installed: pip install 'agentgym-llm[ray]'")

from agentgym.engines.protocol import WeightSync
from agentgym.engines.weights.group_address import GroupAddress
from agentgym.errors import ConfigError, EngineError
from agentgym.trainers.cluster import bucket_broadcast
from agentgym.trainers.cluster.actors import ActorLost
from agentgym.trainers.cluster.board import BoardKeeper
from agentgym.trainers.cluster.bucket_broadcast import BucketSender
from agentgym.trainers.cluster.engine import ClusterEngine, EngineFacts, Engines
from agentgym.trainers.cluster.shipment import Seat, Shipment
from agentgym.trainers.cluster.weight_store import store_weights
from agentgym.trainers.parts.parts import LearnerLost
from agentgym.trainers.settings.cluster import ClusterConfig
from tests.trainers.cluster.conftest import Stored

ROOT = Path(__file__).parents[3]
LISTENER = """
import asyncio, json, logging, pickle, sys
from agentgym.engines.weights.buckets import fused_digests
from agentgym.trainers.cluster import weight_store

logging.basicConfig(stream=sys.stderr)
weight_store.own_node = lambda: "elsewhere"
held = weight_store.HeldWeights()
for line in sys.stdin:
    shipment, seat = pickle.loads(bytes.fromhex(line))
    weights, _ = asyncio.run(held.take(shipment, seat))
    print(json.dumps([fused_digests(weights) == shipment.digests, held.group_name]), flush=True)
"""


class Listener:
    """An engine's process on another node, as far as weights go."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def take(self, shipment: Shipment, seat: Seat) -> None:
        """Begins to take weights."""
        assert self.process.stdin
        print(pickle.dumps((shipment, seat)).hex(), file=self.process.stdin, flush=True)

    def result(self) -> list[Any]:
        """Whether the weights are those that were sent, and the group that the process is in afterwards."""
        assert self.process.stdout
        found: list[Any] = json.loads(self.process.stdout.readline())
        return found


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[list[Listener]]:
    """Two of them, whose warnings are in a file."""
    with ExitStack() as stack, (tmp_path / "warnings").open("w") as warnings:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", LISTENER],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=warnings,
                    text=True,
                    cwd=ROOT,
                )
            )
            for _ in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)
        yield [Listener(process) for process in processes]


def shipped(seed: int) -> Shipment:
    """Weights of several buckets."""
    generator = torch.Generator().manual_seed(seed)
    weights = [(f"model.layers.{number}.w", torch.randn(300, 70, generator=generator)) for number in range(5)]
    return store_weights([(name, tensor.bfloat16()) for name, tensor in weights], 2**17)


def unreadable(shipment: Shipment) -> Shipment:
    """What a process knows of weights that it cannot fetch."""
    buckets = tuple(replace(bucket, parcel=cast(Any, Stored(None))) for bucket in shipment.buckets)
    return replace(shipment, buckets=buckets)


@pytest.mark.long
@pytest.mark.usefixtures("parcels_here")
def test_all_engines_on_other_nodes_have_what_rank_0_sends_and_fetch_it_where_that_fails(
    listeners: list[Listener], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bucket_broadcast, "own_address", lambda: "127.0.0.1")
    sender = BucketSender(on_gpu=False)
    seats = [Seat(sender.invite(3), rank) for rank in (1,)]
    seats.append(Seat(seats[0].invitation, 2))
    group = seats[0].invitation.name
    for version in (shipped(0), shipped(1)):
        for listener, seat in zip(listeners, seats, strict=True):
            listener.take(unreadable(version), seat)
        asyncio.run(sender.send(version))
        assert [listener.result() for listener in listeners] == [[True, group]] * 2

    other = shipped(2)
    for listener, seat in zip(listeners, seats, strict=True):
        listener.take(other, seat)
    asyncio.run(sender.send(shipped(3)))  # other weights than those that it says
    assert [listener.result() for listener in listeners] == [[True, group]] * 2
    assert "not those that were sent" in (tmp_path / "warnings").read_text()

    listeners[1].process.kill()
    listeners[1].process.wait()
    listeners[0].take(other, seats[0])
    with pytest.raises(EngineError, match="could not be broadcast"):
        asyncio.run(sender.send(other))
    assert listeners[0].result() == [True, None]
    assert "they are fetched from the object store" in (tmp_path / "warnings").read_text()

    again = Seat(sender.invite(2), 1)
    listeners[0].take(unreadable(other), again)
    asyncio.run(sender.send(other))
    assert listeners[0].result() == [True, again.invitation.name]


class FakeActor:
    """An engine on a node, or rank 0 of the learner."""

    def __init__(self, label: str, node: str = "") -> None:
        self.label, self.node = label, node
        self.group: str | None = None
        self.calls: list[Any] = []
        self.failure: Exception | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        if method == "place":
            return self.node, self.group
        if method == "is_ready":
            return True
        self.calls.append((method, arguments[-1] if arguments else None))
        if self.failure is not None and method != "invite":
            raise self.failure
        if method == "invite":
            name = f"group {len(self.calls)}"
            return GroupAddress(address="a", port=1, num_ranks=arguments[0], name=name, backend="gloo")
        if method == "update":
            posted, seat = arguments
            self.group = seat and seat.invitation.name
            return WeightSync(version=posted.version), {}
        return None

    def tell(self, method: str, *arguments: Any) -> None:
        """Takes what nobody waits for."""


class Keeper:
    async def post(self, posted: Any) -> None:
        """Takes the newest weights."""


def test_engines_on_other_nodes_join_rank_0_once_and_anew_after_a_failure() -> None:
    near, far, farther = FakeActor("engine 0", "n0"), FakeActor("engine 1", "n1"), FakeActor("engine 2", "n2")
    sender, actors = FakeActor("rank 0"), (near, far, farther)
    facts = EngineFacts(vocab_size=10, context_window=10, dtype="float32")
    engines = Engines(cast(Any, actors), facts, patience_s=1.0)

    def seats() -> list[Any]:
        last = [actor.calls[-1][1] for actor in actors]
        return [seat and (seat.invitation.name, seat.rank, seat.invitation.num_ranks) for seat in last]

    async def run() -> None:
        engine = ClusterEngine(engines, cast(BoardKeeper, Keeper()))

        async def take(version: int) -> None:
            shipment = Shipment(buckets=(), digests={}, gather_s=0.0, node="n0")
            await engine.take_shipment(shipment, version, cast(Any, sender))

        for version in (1, 2):
            await take(version)
            assert seats() == [None, ("group 1", 1, 3), ("group 1", 2, 3)]
        assert [method for method, _ in sender.calls] == ["invite", "send", "send"]
        far.group = None  # it was restarted, or did not get all
        await take(3)
        assert seats() == [None, ("group 4", 1, 3), ("group 4", 2, 3)]
        sender.failure = EngineError("the weights could not be broadcast: somebody is gone")
        await take(4)  # the engines have fetched them
        sender.failure = None
        await take(5)
        assert [method for method, _ in sender.calls][-3:] == ["send", "invite", "send"]
        cast(Any, engine.replicas[2]).seat = Seat(await sender.call("invite", 3), 2)  # it died before it took it
        await engine.take_shipment(Shipment(buckets=(), digests={}, gather_s=0.0, node="n0"), 5)
        assert seats() == [None, None, None]
        sender.failure = ActorLost("rank 0 died")
        with pytest.raises(LearnerLost, match="rank 0 died"):
            await take(6)

    asyncio.run(run())


def test_deltas_and_a_broadcast_are_not_chosen_together() -> None:
    with pytest.raises(ConfigError, match="choose one"):
        ClusterConfig(deltas=True, broadcast=True)
