"""The weights of a fake server: bytes that are kept, checksums as the real server computes them, updates counted."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgym.errors import ConfigError
from agentgym.testing.fake_server.tensors import RawTensor, read_pickled, read_safetensors

__all__ = ["FakeWeights", "UpdateRefused"]

FUSIONS = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""The name part of a published parameter, the server's parameter that it becomes part of, and its index there."""


class UpdateRefused(Exception):
    """An update that the real server would answer with `success: false`."""


class FakeWeights:
    """The parameters by the names of the server. Keeps every byte, so it takes as much memory as the model.

    Tensors that are sent take the dtype of the parameter. As on the real server, a name that the model does not have
    is silently ignored, and so is the output head of a model that ties it to its embeddings.
    """

    def __init__(self, folder: Path, *, tied: bool = False) -> None:
        self.folder = folder
        self.tied = tied
        self.is_open = False
        """True while an update is open."""
        self.adapters: dict[str, str] = {}
        """The sources of the LoRA adapters by name."""
        self.digests: list[str] = []
        """The SHA-256 of each loaded payload, hex, in order."""
        self.num_tensors = 0
        """The number of loaded tensors, over all updates."""
        self._files = sorted(folder.glob("*.safetensors"))
        self._parts: dict[str, dict[int, RawTensor]] | None = None
        self._hashes: dict[str, str] = {}

    def begin(self) -> None:
        """Opens an update; raises UpdateRefused if one is open."""
        if self.is_open:
            raise UpdateRefused("a weight-update session is already open; call end_weight_update() first")
        self.is_open = True

    def end(self) -> None:
        """Closes the update; raises UpdateRefused if none is open."""
        if not self.is_open:
            raise UpdateRefused("no weight-update session is open; call begin_weight_update() first")
        self.is_open = False

    def take(self, serialized: Sequence[str], load_format: str | None) -> None:
        """Loads the tensors of `/update_weights_from_tensor`; raises UpdateRefused if they cannot be loaded."""
        if not self.is_open:
            raise UpdateRefused(
                "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
            )
        if load_format not in (None, "direct"):
            raise UpdateRefused(f"the fake server reads no load_format {load_format!r}: leave it out")
        if not serialized:
            raise UpdateRefused("serialized_named_tensors is empty")
        self.load(self.named_tensors(serialized[0]))

    def named_tensors(self, serialized: str) -> list[tuple[str, RawTensor]]:
        """Returns the tensors of one payload, base64 of a pickled list of (name, tensor); raises UpdateRefused."""
        try:
            payload = base64.b64decode(serialized, validate=True)
            pairs = [(str(name), tensor) for name, tensor in _pairs(read_pickled(payload))]
        except (binascii.Error, ConfigError, TypeError, ValueError) as error:
            raise UpdateRefused(f"the tensors cannot be read: {error}") from error
        self.digests.append(hashlib.sha256(payload).hexdigest())
        return pairs

    def load(self, tensors: Iterable[tuple[str, RawTensor]]) -> None:
        """Stores tensors, named as in a model folder; raises UpdateRefused for a wrong shape."""
        parts = self._load_parts()
        for name, tensor in tensors:
            target, part = self._target_of(name)
            tensor_before = parts.get(target, {}).get(part)
            if tensor_before is None and self._files:
                continue
            if tensor_before is not None and tensor_before.shape != tensor.shape:
                raise UpdateRefused(f"{name} has the shape {tensor_before.shape}, got {tensor.shape}")
            parts.setdefault(target, {})[part] = tensor if tensor_before is None else tensor.to(tensor_before.dtype)
            self._hashes.pop(target, None)
            self.num_tensors += 1

    def load_folder(self, folder: Path) -> None:
        """Loads a model folder's safetensors; raises UpdateRefused if there are none."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UpdateRefused(f"Failed to update weights: no safetensors in {str(folder)!r}")
        for file in files:
            self.load(read_safetensors(file))

    def checksums(self, skip: Sequence[str] = ()) -> dict[str, str]:
        """Returns the first 16 hex digits of the SHA-256 of each parameter's bytes, as a real server on CPU does."""
        parts = self._load_parts()
        for name, pieces in parts.items():
            if name not in self._hashes:
                hasher = hashlib.sha256()
                for part_index in sorted(pieces):
                    hasher.update(pieces[part_index].data)
                self._hashes[name] = hasher.hexdigest()[:16]
        return {name: self._hashes[name] for name in parts if not any(part in name for part in skip)}

    def _load_parts(self) -> dict[str, dict[int, RawTensor]]:
        if self._parts is None:
            self._parts = {}
            for file in self._files:
                for name, tensor in read_safetensors(file):
                    target, part = self._target_of(name)
                    if not (self.tied and target == "lm_head.weight"):
                        self._parts.setdefault(target, {})[part] = tensor
        return self._parts

    @staticmethod
    def _target_of(name: str) -> tuple[str, int]:
        """Returns the server's parameter for a published one, and the index in it."""
        words = name.split(".")
        for index, word in enumerate(words):
            if word in FUSIONS:
                words[index], part = FUSIONS[word]
                return ".".join(words), part
        return name, 0


def overall(checksums: Mapping[str, str]) -> tuple[str, str]:
    """Returns `per_gpu_checksum` and `per_engine_checksum` of a server with one rank."""
    hasher = hashlib.sha256()
    for name in sorted(checksums):
        hasher.update(name.encode())
        hasher.update(checksums[name].encode())
    per_gpu = hasher.hexdigest()
    return per_gpu, hashlib.sha256(per_gpu.encode()).hexdigest()


def _pairs(value: Any) -> list[tuple[Any, RawTensor]]:
    pairs = list(value.items()) if isinstance(value, Mapping) else list(value)
    for _, tensor in pairs:
        if not isinstance(tensor, RawTensor):
            raise ValueError(f"a tensor was wanted, got a {type(tensor).__name__}")
    return pairs
