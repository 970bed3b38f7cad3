"""Weights in the cluster's object store: the rank that has them stores them, engines and checkpoints read them there.

They pass no other process on their way. An engine on another node may fetch no more than what a step changed: of
weights in bfloat16 that is little, since an optimizer's step is mostly smaller than half the distance of two numbers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from agentgym.engines.weights.buckets import fused_digests
from agentgym.errors import EngineError
from agentgym.model.model_folder import write_model_config
from agentgym.trainers.cluster.actors import Parcel, own_node
from agentgym.trainers.cluster.bucket_broadcast import BucketListener, as_tensor
from agentgym.trainers.cluster.shipment import Bucket, Delta, PackedTensor, Seat, Shipment
from agentgym.types import JSON

__all__ = ["HeldWeights", "read_weights", "store_weights", "write_weights"]

_log = logging.getLogger(__name__)

BUCKET_BYTES = 2**28
FILE_BUCKETS = 4
"""The number of buckets in a file of weights."""
ALIGNMENT = 64
PLACE_BYTES = 4
_LAYER = re.compile(r"^.*?\.\d+\.")


def store_weights(
    weights: Iterable[tuple[str, Tensor]],
    max_bytes: int = BUCKET_BYTES,
    *,
    has_deltas: bool = False,
    before: Shipment | None = None,
) -> Shipment:
    """Stores weights, given by published name and layer by layer; besides them, one bucket is in memory at a time.

    A bucket is larger than `max_bytes` only if a layer is. With `has_deltas` the next shipment may have the changes
    since this one, as this one has those since `before`, which this process must have stored.
    """
    started = time.perf_counter()
    buckets: list[Bucket] = []
    digests, memory = {}, np.empty(0, np.uint8)
    for tensors in _portions(weights, max_bytes):
        places, size = _places_of(tensors)
        if size > len(memory):  # new memory is slow: the system clears each page of it
            memory = np.zeros(size, np.uint8)
        old = None if before is None else before.buckets[len(buckets)]
        buckets.append(_pack(tensors, places, memory[:size], old))
        digests.update(fused_digests(tensors))
    return Shipment(
        buckets=tuple(buckets),
        digests=digests,
        gather_s=time.perf_counter() - started,
        node=own_node(),
        name=secrets.token_hex(8) if has_deltas else None,
        base=None if before is None else before.name,
    )


class HeldWeights:
    """The weights that an engine took last, if it is on another node and has them by broadcast or as changes."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._packed: list[NDArray[Any]] = []
        self._listener = BucketListener()

    @property
    def group_name(self) -> str | None:
        """The group from which this process has weights by broadcast."""
        return self._listener.group_name

    async def take(self, shipment: Shipment, seat: Seat | None = None) -> tuple[dict[str, Tensor], int | None]:
        """Returns the weights, which hold until the next call, and the bytes fetched, or None if they were not counted.

        With a seat they come by broadcast. Where that fails, or they or the held weights with their changes have other
        digests than the shipment, it logs so and fetches all.
        """
        if shipment.node == own_node():
            return await read_weights(shipment), None
        if seat is not None and (heard := await self._hear(shipment, seat)) is not None:
            return heard, None
        if shipment.name is None:
            return await read_weights(shipment), None
        base, self._name = self._name, None
        fetched = 0
        if base is not None and base == shipment.base:
            fetched = await self._change(shipment)
            weights = _unpack_all(shipment, self._packed)
            if await asyncio.to_thread(fused_digests, weights) == shipment.digests:
                self._name = shipment.name
                return weights, fetched
            _log.warning("the changes of weights did not give the new ones: all of them are fetched")
        arrays = await _open_all([bucket.parcel for bucket in shipment.buckets])
        self._packed = await asyncio.to_thread(lambda: [array.copy() for array in arrays])
        self._name = shipment.name
        return _unpack_all(shipment, self._packed), fetched + sum(array.nbytes for array in arrays)

    async def _hear(self, shipment: Shipment, seat: Seat) -> dict[str, Tensor] | None:
        """Returns the weights that are broadcast, or None if they do not arrive."""
        try:
            weights = _unpack_all(shipment, await self._listener.receive(shipment, seat))
        except EngineError as error:
            _log.warning("%s; they are fetched from the object store", error)
            return None
        if await asyncio.to_thread(fused_digests, weights) == shipment.digests:
            return weights
        _log.warning("the weights that were broadcast are not those that were sent: all of them are fetched")
        return None

    async def _change(self, shipment: Shipment) -> int:
        """Changes the held weights, and returns the bytes that this took."""
        buckets = shipment.buckets
        arrays = await _open_all([bucket.parcel if bucket.delta is None else bucket.delta.parcel for bucket in buckets])
        for bucket, array, own in zip(buckets, arrays, self._packed, strict=True):
            await asyncio.to_thread(_apply, bucket.delta, array, own)
        return sum(array.nbytes for array in arrays)


async def _open_all(parcels: Sequence[Parcel]) -> list[NDArray[Any]]:
    return list(await asyncio.gather(*(parcel.open() for parcel in parcels)))


async def read_weights(shipment: Shipment) -> dict[str, Tensor]:
    """Returns the weights as views of the object store of this process's node, which are not to be changed.

    They are sent to the node first if they are on another one. Raises ParcelLost if they are gone.
    """
    return _unpack_all(shipment, await _open_all([bucket.parcel for bucket in shipment.buckets]))


def write_weights(shipment: Shipment, config: Mapping[str, JSON], folder: Path) -> None:
    """Writes a model folder as `transformers` does: several files, with an index, if there are many buckets.

    `config` is the contents of `config.json`. Raises ParcelLost if the weights are gone.
    """
    starts = range(0, len(shipment.buckets), FILE_BUCKETS)
    parts = [shipment.buckets[start : start + FILE_BUCKETS] for start in starts]
    names, number = ["model.safetensors"], len(parts)
    if number > 1:
        names = [f"model-{index + 1:05}-of-{number:05}.safetensors" for index in range(number)]
    write_model_config(config, getattr(torch, shipment.buckets[0].tensors[0].dtype), folder)
    for name, part in zip(names, parts, strict=True):
        tensors: dict[str, Tensor] = {}
        for bucket in part:
            tensors |= _unpack(bucket, bucket.parcel.take())
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if number > 1:
        _write_index(folder, names, parts)


def _portions(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yields the weights in portions; tensors of a layer stay together, as a server may hold some of them as one."""
    portion: dict[str, Tensor] = {}
    for _, named in groupby(weights, lambda item: found[0] if (found := _LAYER.match(item[0])) else item[0]):
        layer = dict(named)
        if portion and sum(tensor.nbytes for tensor in (*portion.values(), *layer.values())) > max_bytes:
            yield portion
            portion = {}
        portion |= layer
    yield portion


def _places_of(tensors: Mapping[str, Tensor]) -> tuple[tuple[PackedTensor, ...], int]:
    """Returns the positions of tensors in a bucket, and its size in bytes."""
    places, end = [], 0
    for name, tensor in tensors.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(PackedTensor(name, dtype, tuple(tensor.shape), start, tensor.nbytes))
    return tuple(places), end


def _pack(
    tensors: Mapping[str, Tensor], places: tuple[PackedTensor, ...], packed: NDArray[Any], before: Bucket | None
) -> Bucket:
    """Stores tensors, which are copied to `packed` on their way, and what changed of them."""
    for place, tensor in zip(places, tensors.values(), strict=True):
        part = torch.from_numpy(packed[place.start : place.start + place.num_bytes])
        part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    delta = None
    if before is not None and before.tensors == places:
        delta = _delta_of(before.parcel.take(), packed, min(tensor.element_size() for tensor in tensors.values()))
    return Bucket(places, Parcel.of(packed), delta)


def _delta_of(before: NDArray[Any], packed: NDArray[Any], element_bytes: int) -> Delta | None:
    """Stores the elements that changed; None if that takes more than half of the bytes of all."""
    old, new = (_elements(array, element_bytes) for array in (before, packed))
    places = (old != new).nonzero().view(-1)
    most = new.numel() * element_bytes // (2 * (PLACE_BYTES + element_bytes))
    if len(places) > most or new.numel() > 2**32:
        return None
    content = np.concatenate([places.numpy().astype(np.uint32).view(np.uint8), new[places].numpy().view(np.uint8)])
    return Delta(Parcel.of(content), element_bytes)


def _apply(delta: Delta | None, content: NDArray[Any], packed: NDArray[Any]) -> None:
    """Changes the elements of a bucket; without a delta the content is the whole of it."""
    if delta is None:
        packed[:] = content
    elif count := len(content) // (PLACE_BYTES + delta.element_bytes):
        places = torch.from_numpy(content[: PLACE_BYTES * count].view(np.uint32).astype(np.int64))
        _elements(packed, delta.element_bytes)[places] = _elements(content[PLACE_BYTES * count :], delta.element_bytes)


def _elements(packed: NDArray[Any], element_bytes: int) -> Tensor:
    """Returns the bytes of a bucket as integers of so many bytes."""
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}[element_bytes]
    return as_tensor(packed).view(dtype)


def _unpack_all(shipment: Shipment, arrays: Sequence[NDArray[Any]]) -> dict[str, Tensor]:
    pairs = zip(shipment.buckets, arrays, strict=True)
    return {name: tensor for bucket, packed in pairs for name, tensor in _unpack(bucket, packed).items()}


def _unpack(bucket: Bucket, packed: NDArray[Any]) -> dict[str, Tensor]:
    whole = as_tensor(packed)
    return {
        place.name: whole[place.start : place.start + place.num_bytes]
        .view(getattr(torch, place.dtype))
        .view(place.shape)
        for place in bucket.tensors
    }


def _write_index(folder: Path, names: Sequence[str], parts: Sequence[Sequence[Bucket]]) -> None:
    pairs = zip(names, parts, strict=True)
    tensors = [(place, name) for name, part in pairs for bucket in part for place in bucket.tensors]
    index = {
        "metadata": {"total_size": sum(place.num_bytes for place, _ in tensors)},
        "weight_map": {place.name: name for place, name in tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
