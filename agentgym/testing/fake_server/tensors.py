"""Reads tensors without torch: from a pickle that torch made, and from a safetensors file. Runs no code of either."""

from __future__ import annotations

import collections
import io
import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.errors import NOT_JSON, ConfigError, RunFolderError

__all__ = ["RawTensor", "read_pickled", "read_safetensors"]

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A contiguous tensor as bytes: `RawTensor("F32", (2, 3), data)`."""

    dtype: str
    """The dtype's name in safetensors."""
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        num_bytes = math.prod(self.shape) * SIZES[self.dtype]
        if len(self.data) != num_bytes:
            raise ConfigError(f"a {self.dtype} tensor of {self.shape} has {num_bytes} bytes, got {len(self.data)}")

    def to(self, dtype: str) -> RawTensor:
        """Returns the same values in another floating dtype (F32, F16, BF16, F64); itself if nothing changes."""
        if dtype == self.dtype:
            return self
        values = self.floats()
        if dtype == "BF16":
            bits = values.astype(np.float32).view(np.uint32)
            rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
            return RawTensor(dtype, self.shape, (rounded >> 16).astype(np.uint16).tobytes())
        return RawTensor(dtype, self.shape, values.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).tobytes())

    def floats(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Returns the values, flat; raises ConfigError for a dtype that is not floating."""
        if self.dtype == "BF16":
            return (np.frombuffer(self.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        try:
            return np.frombuffer(self.data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[self.dtype])
        except KeyError:
            raise ConfigError(f"a floating tensor was wanted, got {self.dtype}") from None


def read_safetensors(path: Path) -> Iterator[tuple[str, RawTensor]]:
    """Yields the tensors of a file in the safetensors format; raises RunFolderError for a torn file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                file.seek(8 + length + start)
                yield name, RawTensor(entry["dtype"], tuple(entry["shape"]), file.read(end - start))
        except (*NOT_JSON, KeyError, ConfigError) as error:
            raise RunFolderError(f"{str(path)!r} is not a whole safetensors file: {error}") from error


def read_pickled(payload: bytes) -> Any:
    """Returns the pickled object, with `RawTensor` in place of each tensor: a list of (name, tensor), or a mapping.

    Only torch's tensors on CPU and plain containers are read; raises ConfigError that names any other object.
    """
    try:
        return _TensorReader(io.BytesIO(payload)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"pickled tensors cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    data: bytes


def _rebuild_tensor(storage: _Storage, offset: int, shape: Sequence[int], stride: Sequence[int], *_: Any) -> RawTensor:
    size = SIZES[storage.dtype]
    if math.prod(shape) == 0:
        return RawTensor(storage.dtype, tuple(shape), b"")
    array = np.frombuffer(storage.data, f"V{size}", offset=offset * size)
    last = sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
    if last >= len(array) or min(stride, default=0) < 0:
        raise ValueError(f"shape {tuple(shape)} and stride {tuple(stride)} reach beyond a storage of {len(array)}")
    view = np.lib.stride_tricks.as_strided(array, tuple(shape), tuple(step * size for step in stride))
    return RawTensor(storage.dtype, tuple(shape), view.tobytes())


def _rebuild_parameter(tensor: RawTensor, *_: Any) -> RawTensor:
    return tensor


def _load_storage(data: bytes) -> _Storage:
    """Reads a storage as `torch.save` writes a single one: three headers, its description, its key, its bytes."""
    file = io.BytesIO(data)
    for _ in range(3):
        _TensorReader(file).load()
    storage = _TensorReader(file).load()
    _TensorReader(file).load()
    count = int.from_bytes(file.read(8), "little")
    return _Storage(storage.dtype, file.read(count * SIZES[storage.dtype]))


class _TensorReader(pickle.Unpickler):
    """An unpickler that knows only the few names that a pickled CPU tensor uses."""

    GLOBALS: Mapping[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("torch.storage", "_load_from_bytes"): _load_storage,
        ("collections", "OrderedDict"): collections.OrderedDict,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Returns the stand-in for a name of torch; refuses every other name."""
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        try:
            return self.GLOBALS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not read here: tensors on CPU alone are") from None

    def persistent_load(self, pid: Any) -> Any:
        """Returns the description of a storage: its dtype; the bytes follow later."""
        if pid[0] != "storage" or not isinstance(pid[1], str):
            raise pickle.UnpicklingError(f"a storage was wanted, got {pid!r}")
        return _Storage(pid[1], b"")
