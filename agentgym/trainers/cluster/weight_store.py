"""Weights in the cluster's object store: the rank that has them stores them, engines and checkpoints read them there.

They pass no other process on their way.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import warnings
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
from agentgym.model.model_folder import write_model_config
from agentgym.trainers.cluster.actors import Parcel
from agentgym.trainers.cluster.shipment import Bucket, PackedTensor, Shipment
from agentgym.types import JSON

__all__ = ["read_weights", "store_weights", "write_weights"]

BUCKET_BYTES = 2**28
FILE_BUCKETS = 4
"""The number of buckets in a file of weights."""
ALIGNMENT = 64
_LAYER = re.compile(r"^.*?\.\d+\.")


def store_weights(weights: Iterable[tuple[str, Tensor]], max_bytes: int = BUCKET_BYTES) -> Shipment:
    """Stores weights, given by published name and layer by layer; besides them, one bucket is in memory at a time.

    A bucket is larger than `max_bytes` only if a layer is.
    """
    started = time.perf_counter()
    buckets: list[Bucket] = []
    digests, memory = {}, np.empty(0, np.uint8)
    for tensors in _portions(weights, max_bytes):
        places, size = _places_of(tensors)
        if size > len(memory):  # new memory is slow: the system clears each page of it
            memory = np.zeros(size, np.uint8)
        buckets.append(_pack(tensors, places, memory[:size]))
        digests.update(fused_digests(tensors))
    return Shipment(buckets=tuple(buckets), digests=digests, gather_s=time.perf_counter() - started)


async def read_weights(shipment: Shipment) -> dict[str, Tensor]:
    """Returns the weights as views of the object store of this process's node, which are not to be changed.

    They are sent to the node first if they are on another one. Raises ParcelLost if they are gone.
    """
    arrays = await asyncio.gather(*(bucket.parcel.open() for bucket in shipment.buckets))
    pairs = zip(shipment.buckets, arrays, strict=True)
    return {name: tensor for bucket, packed in pairs for name, tensor in _unpack(bucket, packed).items()}


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


def _pack(tensors: Mapping[str, Tensor], places: tuple[PackedTensor, ...], packed: NDArray[Any]) -> Bucket:
    """Stores tensors, which are copied to `packed` on their way."""
    for place, tensor in zip(places, tensors.values(), strict=True):
        part = torch.from_numpy(packed[place.start : place.start + place.num_bytes])
        part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return Bucket(places, Parcel.of(packed))


def _unpack(bucket: Bucket, packed: NDArray[Any]) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is the object store's memory
        whole = torch.from_numpy(packed)
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
