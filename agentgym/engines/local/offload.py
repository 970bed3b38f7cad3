"""Releases the memory of an in-process engine while others need it: tensors stay valid, their storage is freed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentgym.engines.local.kv_cache import SlotCache

__all__ = ["regain_memory", "release_memory"]


def release_memory(parameters: Sequence[Tensor], cache: SlotCache) -> None:
    """Frees the storage of weights and cache; until `regain_memory` and new weights they must not be read.

    Views of the weights that were made before may show other data later.
    """
    cache.release_memory()
    for parameter in parameters:
        if not parameter.untyped_storage().resizable():  # such as what safetensors read
            parameter.data = parameter.data.clone()
        parameter.untyped_storage().resize_(0)
    if any(parameter.is_cuda for parameter in parameters):
        torch.cuda.empty_cache()  # or other processes would not get it


def regain_memory(parameters: Sequence[Tensor], cache: SlotCache) -> None:
    """Allocates memory again that was released; the contents of the weights are undefined then."""
    cache.regain_memory()
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if not storage.nbytes():
            storage.resize_(parameter.numel() * parameter.element_size())
