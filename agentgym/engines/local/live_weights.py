"""The weights of an in-process engine as they are now: their version, changes nobody told of, and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from agentgym.engines.local.kernels.row_products import forget_packed
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.errors import EngineError
from agentgym.model.language_model import LanguageModel

__all__ = ["LiveWeights"]

_RELEASED = -1  # replaces the count of changes: a step before new weights fails, and reads nothing


class LiveWeights:
    """The parameters that an engine samples from, and the policy version that they are."""

    def __init__(self, model: LanguageModel, version: int) -> None:
        self.parameters = tuple(model.parameters())
        self.version = version
        self._num_changes = self._count_changes()

    @property
    def are_released(self) -> bool:
        """True from `release` to `regain`."""
        return self._num_changes == _RELEASED

    def check(self) -> None:
        """Raises EngineError if the weights changed since the last update."""
        if self._count_changes() != self._num_changes:
            raise EngineError(
                f"the weights changed under version {self.version} without update_weights; call pause, change them,"
                " update_weights({}, version), resume"
            )

    @torch.no_grad()
    def update(self, version: int, tensors: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies the second tensor of each pair into the first, and takes what is there now as version `version`."""
        for own, new in tensors:
            own.copy_(new)
        forget_packed(self.parameters)
        self.version, self._num_changes = version, self._count_changes()

    def release(self, caches: Iterable[SlotCache]) -> None:
        """Frees the storage of weights and caches; until `regain` and new weights they must not be read.

        Views of the weights that were made before may show other data later.
        """
        forget_packed(self.parameters, free=True)
        for cache in caches:
            cache.release_memory()
        for parameter in self.parameters:
            if not parameter.untyped_storage().resizable():  # such as what safetensors read
                parameter.data = parameter.data.clone()
            parameter.untyped_storage().resize_(0)
        if any(parameter.is_cuda for parameter in self.parameters):
            torch.cuda.empty_cache()  # or other processes would not get it
        self._num_changes = _RELEASED

    def regain(self, caches: Iterable[SlotCache]) -> None:
        """Allocates memory again that was released; the contents of the weights are undefined until an update."""
        for cache in caches:
            cache.regain_memory()
        for parameter in self.parameters:
            storage = parameter.untyped_storage()
            if not storage.nbytes():
                storage.resize_(parameter.numel() * parameter.element_size())

    def _count_changes(self) -> int:
        """Counts in-place changes of the parameters, which autograd counts for each."""
        return sum(parameter._version for parameter in self.parameters)
