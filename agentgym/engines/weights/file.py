"""Weights as a file, for an engine that reads them from a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

__all__ = ["write_weight_file"]


def write_weight_file(weights: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> int:
    """Writes `model.safetensors` into `folder` and returns the bytes of the tensors."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())
