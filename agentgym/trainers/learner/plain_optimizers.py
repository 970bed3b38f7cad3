"""torch's optimizers without its compiler, which they import at their first use: it takes seconds."""

from __future__ import annotations

import math
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from agentgym.model.ops.cpu_products import has_bfloat16_products

__all__ = ["PlainAdamW", "PlainMuon"]


class PlainAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the same numbers, by its own methods without the decorators that are for compilation."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)


class PlainMuon(torch.optim.Muon):
    """`torch.optim.Muon` with `match_rms_adamw`: the same bits, where bfloat16 matrices are multiplied fast.

    On other processors it iterates in float32: a step of lessons of 5.8 million parameters took 4 s there, and 17 s
    with torch's own.
    """

    zero_grad = unwrap(torch.optim.Muon.zero_grad)
    add_param_group = unwrap(torch.optim.Muon.add_param_group)
    state_dict = unwrap(torch.optim.Muon.state_dict)
    load_state_dict = unwrap(torch.optim.Muon.load_state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps on the gradients that are there; there is no `closure`."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_on(parameter, group)

    def _step_on(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = _orthogonal(gradient.lerp(momentum, group["momentum"]), group["ns_coefficients"], group["ns_steps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * (0.2 * math.sqrt(max(parameter.shape))))  # as large as of AdamW


def _orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int) -> Tensor:
    """Returns U V^T of a matrix U S V^T, nearly: the Newton-Schulz iteration of Jordan et al. (2024)."""
    is_fast = matrix.device.type != "cpu" or has_bfloat16_products()
    is_tall, (a, b, c) = matrix.shape[0] > matrix.shape[1], coefficients
    result = matrix.to(torch.bfloat16 if is_fast else torch.float32, copy=True)
    result = result.T if is_tall else result
    result.div_(result.norm().clamp(min=1e-7))
    for _ in range(num_steps):
        gram = result @ result.T
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.T if is_tall else result
