"""How long weights take from a learner's rank to engines on other nodes: by the object store, and by broadcast.

    python benchmarks/weight_transfer.py [--gb 1] [--engines 2] [--rounds 3] [--address ADDRESS]

Prints a JSON object: seconds a GB of each round, until every engine has the weights and has compared their digests. A
node of a cluster is taken for each engine, and one for the rank. Without an address this machine begins as many nodes,
whose network is its own memory; there the figures tell what each way costs the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentgym.engines.weights.group_address import GroupAddress
from agentgym.trainers.cluster.bucket_broadcast import BucketSender
from agentgym.trainers.cluster.shipment import Seat, Shipment
from agentgym.trainers.cluster.weight_store import HeldWeights, store_weights

LAYER_BYTES = 2**26


class Rank:
    """Rank 0 of a learner: it stores weights, and may broadcast them."""

    def __init__(self) -> None:
        self._sender = BucketSender(on_gpu=False)

    def store(self, num_bytes: int, seed: int) -> list[Shipment]:
        """Stores new weights; in a list, which Ray leaves as it is."""
        torch.manual_seed(seed)
        names = [f"model.layers.{number}.w" for number in range(num_bytes // LAYER_BYTES)]
        self._shipment = store_weights((name, torch.randn(LAYER_BYTES // 4)) for name in names)
        return [self._shipment]

    def invite(self, num_ranks: int) -> GroupAddress:
        """Begins the group of all."""
        return self._sender.invite(num_ranks)

    def send(self) -> None:
        """Broadcasts the weights."""
        asyncio.run(self._sender.send(self._shipment))


class Engine:
    """An engine on another node, as far as weights go."""

    def __init__(self) -> None:
        self._weights = HeldWeights()

    async def take(self, shipments: list[Shipment], seat: Seat | None) -> int:
        """Takes the weights, and returns their bytes."""
        weights, _ = await self._weights.take(shipments[0], seat)
        return sum(tensor.nbytes for tensor in weights.values())


def main() -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--address")
    options = parser.parse_args()
    address = options.address or own_nodes(1 + options.engines, int(options.gb * 2.5e9))
    ray.init(address=address, log_to_driver=False)
    print(json.dumps(measure(options.engines, int(options.gb * 1e9), options.rounds), indent=2))
    ray.shutdown()


def own_nodes(number: int, store_bytes: int) -> str:
    """Begins nodes on this machine, which end with the process."""
    cluster = Cluster()
    for _ in range(number):
        cluster.add_node(num_cpus=1, object_store_memory=store_bytes, include_dashboard=False)
    address: str = cluster.address
    return address


def measure(num_engines: int, num_bytes: int, num_rounds: int) -> dict[str, Any]:
    """Returns the seconds of each way, which take turns."""
    group = placement_group([{"CPU": 1}] * (1 + num_engines), strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def actor(kind: type, index: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        return ray.remote(kind).options(num_cpus=1, scheduling_strategy=strategy).remote()

    rank, engines = actor(Rank, 0), [actor(Engine, 1 + number) for number in range(num_engines)]
    invitation = ray.get(rank.invite.remote(1 + num_engines))
    seats = [Seat(invitation, 1 + number) for number in range(num_engines)]
    seconds: dict[str, list[float]] = {"object store": [], "broadcast": []}
    for number in range(num_rounds + 1):  # the first round, in which the group is joined, does not count
        for way, times in seconds.items():
            shipments = ray.get(rank.store.remote(num_bytes, number))
            started = time.perf_counter()
            sending = [rank.send.remote()] if way == "broadcast" else []
            places = seats if sending else [None] * num_engines
            sizes = ray.get([engine.take.remote(shipments, seat) for engine, seat in zip(engines, places, strict=True)])
            ray.get(sending)
            if number:
                times.append(round((time.perf_counter() - started) / sizes[0] * 1e9, 2))
    return {"engines": num_engines, "GB": round(sizes[0] / 1e9, 2), "seconds a GB": seconds}


if __name__ == "__main__":
    main()
