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
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from agentgym.engines.weights.buckets import fused_digests
from agentgym.model.model_folder import write_model_config
from agentgym.trainers.cluster.actors import Parcel
from agentgym.trainers.cluster.shipment import Bucket, Shipment
from agentgym.types import JSON

__all__ = ["read_weights", "store_weights", "write_weights"]

BUCKET_BYTES = 2**28
FILE_BUCKETS = 4
"""The number of buckets in a file of weights."""
PackedTensor: TypeAlias = tuple[NDArray[Any], str, tuple[int, ...]]
"""The bytes of a tensor, the name of its type in torch, such as `bfloat16`, and its shape."""
_LAYER = re.compile(r"^.*?\.\d+\.")


def store_weights(weights: Iterable[tuple[str, Tensor]], max_bytes: int = BUCKET_BYTES) -> Shipment:
    """Stores weights, given by published name and layer by layer; besides them, one bucket is in memory at a time.

    A bucket is larger than `max_bytes` only if a layer is.
    """
    started = time.perf_counter()
    buckets, digests = [], {}
    for portion in _portions(weights, max_bytes):
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in portion.items()}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        packed = {name: _pack(tensor) for name, tensor in tensors.items()}
        buckets.append(Bucket(tuple(tensors), num_bytes, Parcel.of(packed)))
        digests.update(fused_digests(tensors))
    return Shipment(buckets=tuple(buckets), digests=digests, gather_s=time.perf_counter() - started)


async def read_weights(shipment: Shipment) -> dict[str, Tensor]:
    """Returns the weights as views of the object store of this process's node, which are not to be changed.

    They are sent to the node first if they are on another one. Raises ParcelLost if they are gone.
    """
    opened = await asyncio.gather(*(bucket.parcel.open() for bucket in shipment.buckets))
    return {name: tensor for packed in opened for name, tensor in _unpack(packed).items()}


def write_weights(shipment: Shipment, config: Mapping[str, JSON], folder: Path) -> None:
    """Writes a model folder as `transformers` does: several files, with an index, if there are many buckets.

    `config` is the contents of `config.json`. Raises ParcelLost if the weights are gone.
    """
    starts = range(0, len(shipment.buckets), FILE_BUCKETS)
    parts = [shipment.buckets[start : start + FILE_BUCKETS] for start in starts]
    names, number = ["model.safetensors"], len(parts)
    if number > 1:
        names = [f"model-{index + 1:05}-of-{number:05}.safetensors" for index in range(number)]
    for name, part in zip(names, parts, strict=True):
        tensors: dict[str, Tensor] = {}
        for bucket in part:
            tensors |= _unpack(bucket.parcel.take())
        if name == names[0]:
            write_model_config(config, next(iter(tensors.values())).dtype, folder)
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if number > 1:
        _write_index(folder, names, parts)


def _portions(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yields the weights in portions; tensors of a layer stay together, as a server may hold some of them as one."""
    portion: dict[str, Tensor] = {}
    for _, items in groupby(weights, lambda item: match[0] if (match := _LAYER.match(item[0])) else item[0]):
        layer = dict(items)
        if portion and sum(tensor.nbytes for tensor in (*portion.values(), *layer.values())) > max_bytes:
            yield portion
            portion = {}
        portion |= layer
    yield portion


def _pack(tensor: Tensor) -> PackedTensor:
    """Returns a tensor on the CPU as numpy's bytes, which the object store gives to its readers without a copy."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tensor.reshape(-1).view(torch.uint8).numpy(), dtype, tuple(tensor.shape)


def _unpack(packed: Mapping[str, PackedTensor]) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is the object store's memory
        return {
            name: torch.from_numpy(content).view(getattr(torch, dtype)).view(shape)
            for name, (content, dtype, shape) in packed.items()
        }


def _write_index(folder: Path, names: Sequence[str], parts: Sequence[Sequence[Bucket]]) -> None:
    files = [(name, bucket) for name, part in zip(names, parts, strict=True) for bucket in part]
    index = {
        "metadata": {"total_size": sum(bucket.num_bytes for _, bucket in files)},
        "weight_map": {parameter: name for name, bucket in files for parameter in bucket.names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
