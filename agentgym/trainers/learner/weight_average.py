"""The exponential moving average of the trained weights, in float32: each rank keeps that of its own shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from agentgym.trainers.parallel.sharded_tensor import Gather, Stored, like, whole

__all__ = ["WeightAverage"]


class WeightAverage:
    """The average of parameters by name; `stepped` are the tensors that the optimizer steps on, float32 for all."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], stepped: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._parameters, self._stepped = parameters, stepped
        self._means = {name: tensor.detach().clone() for name, tensor in stepped.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights after a step: `mean = decay * mean + (1 - decay) * weight`."""
        for name, mean in self._means.items():
            mean.mul_(self.decay).add_(self._stepped[name].detach(), alpha=1.0 - self.decay)

    def state(self, gather: Gather = whole) -> dict[str, Tensor]:
        """The means, whole or as shards."""
        return {name: gather(mean, of=self._parameters[name]) for name, mean in self._means.items()}

    def load(self, state: Mapping[str, Tensor | Stored]) -> None:
        """Loads saved means."""
        for name, mean in self._means.items():
            mean.copy_(like(state[name], self._parameters[name]))
