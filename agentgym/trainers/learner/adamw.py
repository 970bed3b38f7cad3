"""AdamW without torch's compiler, which torch's optimizers import at their first use: it takes seconds."""

from __future__ import annotations

from inspect import unwrap

import torch

__all__ = ["PlainAdamW"]


class PlainAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the same numbers, by its own methods without the decorators that are for compilation."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)
