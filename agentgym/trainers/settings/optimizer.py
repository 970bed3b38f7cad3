"""The settings of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentgym.settings import check_above_zero

__all__ = ["OptimizerConfig"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate schedule."""

    name: str = "adamw"
    """`adamw`; `muon`, which orthogonalizes the update of matrices (Jordan et al. 2024) and leaves the rest to AdamW;
    `sgd`, `adafactor`, or your own as `path/to/file.py:name`; `agentgym algorithms list` shows all."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The settings of an optimizer other than adamw and muon, such as momentum=0.9."""
    learning_rate: float = 4e-4
    """The peak rate. The default suits the embedded model (a million parameters); published runs on billions use about
    1e-6."""
    warmup_steps: int = 2
    """Optimizer steps over which the rate rises to its full value."""
    decay: str = "constant"
    """The rate after the warm-up: `constant`; `linear` falls to zero over the second half of the run, `cosine` over all
    of it (Loshchilov and Hutter 2017); or your own as `path/to/file.py:name`."""
    decay_settings: Mapping[str, object] = field(default_factory=dict)
    """The settings of the decay, such as floor=0.1 of cosine."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients, in [0, 1)."""
    beta2: float = 0.98
    """Decay of AdamW's mean of squared gradients, in [0, 1)."""
    weight_decay: float = 0.0
    """The share of a weight that is subtracted each step, times the learning rate."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down if its global 2-norm is above this."""

    def __post_init__(self) -> None:
        check_above_zero(self, "learning_rate", "max_grad_norm")
