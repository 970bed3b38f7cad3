"""Half-precision weights that train as float32 ones do: the optimizer steps on float32 copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from agentgym.errors import ConfigError
from agentgym.trainers.parallel.sharded_tensor import Stored, like

__all__ = ["MasterWeights"]

HALF = (torch.bfloat16, torch.float16)


class MasterWeights:
    """A float32 copy of each half-precision parameter, on which an optimizer steps; float32 ones need no copy.

    A step of 1e-6 on a weight of 0.02 is far below bfloat16's rounding (0.0001) and would be lost there, every time.
    Gradients are summed in float32 too. Raises ConfigError where torch cannot keep such a gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._of: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in parameters:
            if parameter.dtype not in HALF:
                continue
            if not hasattr(parameter, "grad_dtype"):
                raise ConfigError(
                    f"torch {torch.__version__} keeps no float32 gradients of bfloat16 weights, 2.10 does: install a"
                    " newer one, or learn with learner.dtype float32"
                )
            parameter.grad_dtype = torch.float32
            self._of[parameter] = nn.Parameter(parameter.detach().float())

    def __len__(self) -> int:
        return len(self._of)

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor that the optimizer steps on for this parameter."""
        return self._of.get(parameter, parameter)

    def take_gradients(self) -> None:
        """Moves the parameters' gradients to the masters."""
        for parameter, master in self._of.items():
            master.grad, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def round(self) -> None:
        """Copies the masters to the parameters, rounded."""
        for parameter, master in self._of.items():
            parameter.copy_(master)

    def state(self) -> list[Tensor]:
        """The masters, in the order of the parameters."""
        return [master.detach() for master in self._of.values()]

    @torch.no_grad()
    def load(self, state: Iterable[Tensor | Stored]) -> None:
        """Loads saved masters; raises ConfigError for those of weights in another type."""
        saved = list(state)
        if len(saved) != len(self._of):
            raise ConfigError(
                f"the state has {len(saved)} float32 copies of weights, and these weights need {len(self._of)}: go on"
                " with the type of weights that it was saved with, in one process or on several ranks as before"
            )
        for master, own in zip(self._of.values(), saved, strict=True):
            master.copy_(like(own, master))
