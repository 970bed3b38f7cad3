"""Weights on their way to an engine in another process: bytes or handles, and the digests they must arrive with."""

from __future__ import annotations

import hashlib
import pickle
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler

import torch
from safetensors.torch import save
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from agentgym.errors import EngineError
from agentgym.types import JSON

__all__ = [
    "adapter_payload",
    "as_dtype",
    "cast_tensor",
    "checked_weights",
    "digest",
    "fused_digests",
    "fused_name",
    "fused_sums",
    "memory_handle",
    "overall_digest",
    "pad_vocabulary",
    "pickled_tensors",
    "portions",
    "safetensors_bytes",
    "sendable",
]

_FUSIONS = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""The published parameters that form one parameter of SGLang and vLLM, in this order along the first dimension."""
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY_ROWS = 64  # SGLang pads a vocabulary to a multiple of it
_WORDS_AT_ONCE = 1 << 24  # their int64 indices take 128 MiB
_MULTIPLIER = 0x1E3779B97F4A7C15
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def checked_weights(weights: Mapping[str, object]) -> dict[str, Tensor]:
    """Returns the tensors of an update; raises EngineError for an empty mapping and for values that are not tensors."""
    if not weights:
        raise EngineError("an engine in another process needs the weights themselves: update_weights got none")
    tensors: dict[str, Tensor] = {}
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise EngineError(f"weight {name!r} is a {type(value).__name__}, a tensor was wanted")
        tensors[name] = value.detach()
    return tensors


def as_dtype(weights: Mapping[str, Tensor], dtype: str | None) -> dict[str, Tensor]:
    """Returns the tensors in the engine's dtype (`float32`, `bfloat16`, `float16`); unchanged for None or `auto`."""
    return {name: cast_tensor(tensor, dtype) for name, tensor in weights.items()}


def cast_tensor(tensor: Tensor, dtype: str | None) -> Tensor:
    """Returns a tensor in a dtype as `as_dtype` does."""
    return tensor.to(_DTYPES.get(dtype or "", tensor.dtype))


def safetensors_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns the tensors as a safetensors file."""
    return save({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()})


def memory_handle(tensor: Tensor) -> dict[str, JSON]:
    """Returns the handle with which another process on the same GPU opens the tensor's memory, without a copy.

    The tensor must live until then. `engines/vllm/worker_extension.py` opens it.
    """
    arguments = reduce_tensor(tensor.detach())[1]
    _, shape, stride, offset, _, dtype, _, memory, storage_bytes, storage_offset, _, *shared = arguments
    counter, counter_offset, event, event_sync = shared
    return {
        "shape": list(shape),
        "stride": list(stride),
        "offset": offset,
        "dtype": str(dtype).removeprefix("torch."),
        "memory": b64encode(memory).decode(),
        "storage_bytes": storage_bytes,
        "storage_offset": storage_offset,
        "counter": b64encode(counter).decode(),
        "counter_offset": counter_offset,
        "event": b64encode(event).decode(),
        "event_sync": event_sync,
    }


def sendable(tensors: Mapping[str, Tensor], opens: Callable[[int], bool]) -> Mapping[str, Tensor]:
    """Returns the tensors, copied to the CPU if the receiver cannot open the memory of the GPU that they are on."""
    indices = {tensor.device.index for tensor in tensors.values() if tensor.is_cuda}
    return tensors if all(map(opens, indices)) else {name: tensor.cpu() for name, tensor in tensors.items()}


def pickled_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns the pickled list of (name, tensor) that SGLang takes.

    It has the bytes of tensors on CPU, and handles of those on a GPU, which a server on the same device opens without a
    copy.
    """
    if any(tensor.is_cuda for tensor in tensors.values()):
        return bytes(ForkingPickler.dumps(list(tensors.items())))
    # a clone has a storage of its own: pickling a view would send all that it is a view of
    return pickle.dumps([(name, tensor.contiguous().clone()) for name, tensor in tensors.items()])


def portions(weights: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Splits the weights into parts of at most `max_bytes`, in their order; a larger tensor is a part of its own."""
    part: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in weights.items():
        if part and num_bytes + tensor.nbytes > max_bytes:
            yield part
            part, num_bytes = {}, 0
        part[name] = tensor
        num_bytes += tensor.nbytes
    if part:
        yield part


def adapter_payload(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, str]]:
    """Returns an adapter as one message (a pickled mapping), and the SHA-256 that each tensor must arrive with."""
    sums = {}
    for name, tensor in tensors.items():
        sums[name] = hashlib.sha256(_bytes(tensor)).hexdigest()
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    return pickle.dumps(copies), sums


def digest(parts: Sequence[Tensor]) -> str:
    """Returns the first 16 hex digits of the SHA-256 over the tensors' bytes, as SGLang computes it on CPU."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(_bytes(part))
    return hasher.hexdigest()[:16]


def fused_name(name: str) -> str:
    """Returns the name of the parameter of SGLang and vLLM that a published tensor is, or is a part of."""
    parts = name.split(".")
    slot = next((index for index, part in enumerate(parts) if part in _FUSIONS), None)
    return name if slot is None else ".".join([*parts[:slot], _FUSIONS[parts[slot]], *parts[slot + 1 :]])


def fused_digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns a digest for each parameter as SGLang and vLLM hold it: q, k and v in one, gate and up in one."""
    return {name: digest(parts) for name, parts in _parts_by_parameter(weights).items()}


def fused_sums(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns a number for each of these parameters, which differs when the tensors do, but for chance.

    It is computed where the tensors are, and read from there once; vLLM's workers give the same (`agentgym_sums`). The
    digests of `fused_digests` are those of bytes on the CPU. It is not a checksum against intent.
    """
    groups = _parts_by_parameter(weights)
    if not groups:
        return {}
    sums = torch.stack([_sum_of_parts(parts) for parts in groups.values()]).tolist()
    return {name: str(number) for name, number in zip(groups, sums, strict=True)}


def _parts_by_parameter(weights: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Returns the parts of each parameter of SGLang and vLLM, in their order along the first dimension."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        key = next((part for part in name.split(".") if part in _FUSIONS), "")
        groups.setdefault(fused_name(name), {})[key] = tensor
    order = list(_FUSIONS)
    return {
        name: [parts[key] for key in sorted(parts, key=lambda key: order.index(key) if key else 0)]
        for name, parts in groups.items()
    }


def _sum_of_parts(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the parts' elements as integers, each times an odd number of its place, modulo 2^64."""
    total, start = torch.zeros((), dtype=torch.int64, device=parts[0].device), 0
    for tensor in parts:
        flat = tensor.detach().contiguous().reshape(-1)
        words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        for some in words.split(_WORDS_AT_ONCE):
            index = torch.arange(start, start + len(some), device=some.device) * _MULTIPLIER
            total += ((index ^ (index >> 29)) | 1).mul_(some).sum()
            start += len(some)
    return total


def pad_vocabulary(name: str, tensor: Tensor) -> Tensor:
    """Returns a parameter as SGLang mostly holds it: with rows of zeros up to a multiple of 64 for a vocabulary."""
    missing = -len(tensor) % _VOCABULARY_ROWS if name.endswith(_VOCABULARY) and tensor.ndim == 2 else 0
    return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])]) if missing else tensor


def overall_digest(digests: Mapping[str, str]) -> str:
    """Returns one digest over all names and digests."""
    hasher = hashlib.sha256()
    for name in sorted(digests):
        hasher.update(f"{name}={digests[name]};".encode())
    return hasher.hexdigest()[:16]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
