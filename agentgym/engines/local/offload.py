"""The memory of an in-process engine, given up while others need it: tensors stay, what they lie in goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentgym.engines.local.kv_cache import SlotCache

__all__ = ["regain_memory", "release_memory"]


def release_memory(parameters: Sequence[Tensor], cache: SlotCache) -> None:
    """Frees what weights and cache lie in. Until `regain_memory` and new weights nobody may read them; views of the
    weights that were made before may be of what lay there then."""
    cache.release_memory()
    for parameter in parameters:
        if not parameter.untyped_storage().resizable():  # as what safetensors read
            parameter.data = parameter.data.clone()
        parameter.untyped_storage().resize_(0)
    if any(parameter.is_cuda for parameter in parameters):
        torch.cuda.empty_cache()  # or other processes would not get it


def regain_memory(parameters: Sequence[Tensor], cache: SlotCache) -> None:
    """Takes memory again where it was given up; the weights are then whatever lay there."""
    cache.regain_memory()
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if not storage.nbytes():
            storage.resize_(parameter.numel() * parameter.element_size())
