"""Reads the metadata of `torch.distributed.checkpoint`, which is a pickle, without running code from the pickle."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from agentgym.errors import RunFolderError

__all__ = ["MetadataReader"]

_CLASSES = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}
"""The names that the metadata of tensors consists of, besides the dtypes of torch."""


class MetadataReader(FileSystemReader):
    """A `FileSystemReader` that reads the metadata of tensors and refuses every other name in the pickle.

    torch's own reader calls whatever the file names: an untrusted checkpoint could run any program.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = folder / ".metadata"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata; raises RunFolderError for a pickle that contains anything else."""
        try:
            with self._file.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except (
            *(pickle.UnpicklingError, EOFError, OSError, ValueError, TypeError, AttributeError, IndexError, KeyError),
        ) as error:
            raise RunFolderError(f"{str(self._file)!r} is not metadata of tensors: {error}") from error
        if not isinstance(metadata, Metadata):
            raise RunFolderError(f"{str(self._file)!r} is not metadata of tensors but a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns one of the allowed classes or dtypes; raises UnpicklingError for another name."""
        if (module, name) in _CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code: the file was not made by a run")
