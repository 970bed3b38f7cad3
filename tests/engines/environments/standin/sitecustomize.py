"""What SGLang takes for granted and a machine without a GPU lacks. Python imports this file at its start.

Two operators that torchvision expects when it is imported, and that its CUDA build does not bring on CPU: they can go
when the package index has a CPU build of the pinned torchvision. And pinned memory, which SGLang's LoRA layers and its
record of experts ask for without looking: on CPU there is nothing to pin it for.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")
_LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*arguments, **options)

    return made


for _name in ("empty", "full", "ones", "tensor", "zeros"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor


class _NoRuntime:
    """Stands for CUDA's runtime, where host memory is registered with it."""

    def cudaHostRegister(self, *_: object) -> int:
        return 0


torch.cuda.cudart = lambda: _NoRuntime()
