"""Optimizers besides AdamW and Muon, and the schedules of the learning rate, by name.

An optimizer of your own is a function `(parameters, learning_rate, *, settings) -> torch.optim.Optimizer`, a schedule
one from any of `step`, `total_steps` and `warmup_steps` to the share of the peak rate.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.registry import Registry
from agentgym.settings.functions import Contract, convert_function_errors, with_settings

__all__ = ["BUILT_IN", "OPTIMIZERS", "SCHEDULES", "make_optimizer", "schedule_share"]

OptimizerMaker: TypeAlias = Callable[..., torch.optim.Optimizer]
Schedule: TypeAlias = Callable[..., float]

BUILT_IN = ("adamw", "muon")
"""The optimizers that are chosen by name and are no functions of the table: Muon needs to know the model."""
OPTIMIZERS: Registry[OptimizerMaker] = Registry(
    "optimizer",
    "`agentgym algorithms list` shows all but adamw and muon.",
    check=Contract("optimizer", ("parameters", "learning_rate")).check,
)
"""Maps names to functions that make an optimizer of a list of tensors; its rate is set before each step."""
SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    "`agentgym algorithms list` shows all.",
    check=Contract("schedule", (), optional=("step", "total_steps", "warmup_steps")).check,
)
"""Maps names to functions that give the share of the peak rate at a step (from 0); the warm-up comes on top."""


@OPTIMIZERS.register("sgd")
def sgd(
    parameters: Sequence[Tensor], learning_rate: float, *, momentum: float = 0.0, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Plain gradient descent, with momentum if it is above 0."""
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)


@OPTIMIZERS.register("adafactor")
def adafactor(
    parameters: Sequence[Tensor], learning_rate: float, *, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Adafactor: mean squares of a matrix by its rows and columns, so that its state takes next to no memory.

    Shazeer and Stern (2018), arXiv:1804.04235, as `torch.optim.Adafactor` computes it.
    """
    return torch.optim.Adafactor(parameters, lr=learning_rate, weight_decay=weight_decay)


@SCHEDULES.register("constant")
def constant_rate() -> float:
    """The peak rate throughout."""
    return 1.0


@SCHEDULES.register("linear")
def linear_decay(step: int, total_steps: int, warmup_steps: int, *, flat: float = 0.5) -> float:
    """The peak rate for the share `flat` of the run, then down to zero in a straight line; with 0 from the warm-up on.

    With `flat=0.0` it is the linear schedule of transformers.
    """
    start = max(flat * total_steps, warmup_steps)
    return min(1.0, (total_steps - step) / max(1.0, total_steps - start))


@SCHEDULES.register("cosine")
def cosine_decay(step: int, total_steps: int, warmup_steps: int, *, floor: float = 0.0) -> float:
    """A half cosine from the warm-up to the end, down to the share `floor`.

    Loshchilov and Hutter (2017), arXiv:1608.03983, without restarts.
    """
    done = max(0, step - warmup_steps) / max(1, total_steps - warmup_steps)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def make_optimizer(
    name: str, parameters: Sequence[Tensor], learning_rate: float, settings: Mapping[str, object]
) -> torch.optim.Optimizer:
    """Returns an optimizer of the table; raises ConfigError if its function returns something else."""
    make: Callable[..., object] = with_settings(name, OPTIMIZERS[name], settings, ("parameters", "learning_rate"))
    with convert_function_errors(name, OPTIMIZERS[name]):
        optimizer = make(list(parameters), learning_rate)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer {name!r} returns a {type(optimizer).__name__}, no torch.optim.Optimizer")
    return optimizer


def schedule_share(name: str, settings: Mapping[str, object], position: Mapping[str, int]) -> float:
    """Returns the share of the peak rate that a schedule leaves at a position: `step`, `total_steps`, `warmup_steps`.

    Raises ConfigError for a share that is not a number of at least 0.
    """
    function = SCHEDULES[name]
    parameters = inspect.signature(function).parameters
    decide: Callable[..., object] = with_settings(name, function, settings, position)
    with convert_function_errors(name, function):
        share = decide(**{key: value for key, value in position.items() if key in parameters})
    if not isinstance(share, int | float) or not 0.0 <= share < math.inf:
        where = f"at step {position['step']} of {position['total_steps']}"
        raise ConfigError(f"schedule {name!r} gives {share!r} {where}, where a share of at least 0 was wanted")
    return float(share)
