"""The settings of the optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_pair

__all__ = ["BIG", "OptimizerConfig", "UsualOptimizer"]

BIG = 50_000_000
"""The parameters from which a model is taken for a published one, whose rates are far smaller."""


@dataclass(frozen=True)
class UsualOptimizer:
    """The optimizer and its peak rate where none is given, for models up to `BIG` parameters and above; its warm-up."""

    small: tuple[str, float]
    big: tuple[str, float]
    warmup_steps: int


_USUAL = UsualOptimizer(("adamw", 4e-4), ("adamw", 1e-6), 2)


@config_class
class OptimizerConfig:
    """The optimizer and its learning rate schedule."""

    name: str | None = None
    """`adamw`; `muon`, which orthogonalizes the update of matrices (Jordan et al. 2024) and leaves the rest to AdamW;
    `sgd`, `adafactor`, or your own as `path/to/file.py:name`; `agentgym algorithms list` shows all. None is `adamw`, or
    `muon` where `agentgym sft` teaches a model below 50 million parameters."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The settings of an optimizer other than adamw and muon, such as momentum=0.9 of sgd."""
    learning_rate: float | None = None
    """The peak rate. None goes by the model: 4e-4 suits the embedded one (a million parameters), and models of 50
    million or more get 1e-6, as in published runs. `sft` and `dpo` have rates of their own."""
    warmup_steps: int | None = None
    """Optimizer steps over which the rate rises to its full value. None is 2, and a tenth of the steps of `sft` and
    `dpo`, at most 30 and 10."""
    decay: str = "constant"
    """The rate after the warm-up: `constant`; `linear` falls to zero over the second half of the run, `cosine` over all
    of it (Loshchilov and Hutter 2017); or your own as `path/to/file.py:name`."""
    decay_settings: Mapping[str, object] = field(default_factory=dict)
    """The settings of the decay, such as floor=0.1 of cosine."""
    betas: tuple[float, float] = (0.9, 0.98)
    """The decays of AdamW's means of gradients and of their squares, in [0, 1); an optimizer without such means takes
    the default alone."""
    weight_decay: float = 0.0
    """The share of a weight that is subtracted each step, times the learning rate; of sgd it is added to the gradient,
    as in torch."""
    weight_decays: Mapping[str, float] = field(default_factory=dict)
    """Weight decays of some parameters, by a regular expression that is in their published names, such as
    'norm|bias'=0; the first that is counts."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Factors of the learning rate for some parameters, by a regular expression that is in their published names, such
    as embed_tokens=0.1 'layers\\.[0-3]\\.'=0; the first that is counts, and 0 freezes them."""
    layer_decay: float = 1.0
    """The factor of the learning rate from each layer to the one below it, in (0, 1]: 1 at the head, then once for the
    last layer, and so on down to the embedding (ELECTRA, Clark et al. 2020). 1 is off."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down if its global 2-norm is above this."""

    def for_size(
        self, num_parameters: int, usual: UsualOptimizer = _USUAL, steps: int | None = None
    ) -> OptimizerConfig:
        """Returns the settings for a model of this size: with the usual optimizer and rate where none is given.

        The usual warm-up is at most a tenth of the `steps`, if they are known.
        """
        name, rate = usual.small if num_parameters < BIG else usual.big
        warmup = usual.warmup_steps if steps is None else min(usual.warmup_steps, steps // 10)
        return replace(
            self,
            name=self.name or name,
            learning_rate=self.learning_rate or rate,
            warmup_steps=warmup if self.warmup_steps is None else self.warmup_steps,
        )

    @property
    def peak_rate(self) -> float:
        """The learning rate, which `for_size` sets where none is given."""
        assert self.learning_rate is not None, "for_size sets it"
        return self.learning_rate

    @property
    def own_betas(self) -> tuple[float, float] | None:
        """The betas, or None if they are the defaults."""
        return None if self.betas == OptimizerConfig.betas else self.betas

    @property
    def num_warmup(self) -> int:
        """The steps of the warm-up, which `for_size` sets where none are given."""
        assert self.warmup_steps is not None, "for_size sets them"
        return self.warmup_steps

    def __post_init__(self) -> None:
        check_above_zero(self, *(["learning_rate"] if self.learning_rate is not None else []), "max_grad_norm")
        if not 0.0 < self.layer_decay <= 1.0:
            raise ConfigError(f"layer_decay must be in (0, 1], got {self.layer_decay}; 1 switches it off")
        check_pair("optimizer.betas", self.betas)
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"optimizer.betas must be in [0, 1), got {self.betas[0]:g} and {self.betas[1]:g}")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optimizer.weight_decay must be at least 0, got {self.weight_decay}")
        for name in ("rates", "weight_decays"):
            for pattern, value in getattr(self, name).items():
                _check_own(name, pattern, value)

    @property
    def has_groups(self) -> bool:
        """True if some parameters have a rate or a weight decay of their own."""
        return bool(self.rates or self.weight_decays or self.layer_decay != 1.0)


def _check_own(name: str, pattern: str, value: object) -> None:
    """Raises ConfigError for a pattern that is not a regular expression, or a value below 0."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"optimizer.{name}: {pattern!r} is not a regular expression ({error})") from error
    if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise ConfigError(f"optimizer.{name} are numbers of at least 0, got {value!r} for {pattern!r}")
