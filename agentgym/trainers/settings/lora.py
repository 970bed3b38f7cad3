"""The settings of trained adapters."""

from __future__ import annotations

import math
from dataclasses import replace

from agentgym.errors import ConfigError, nearest
from agentgym.model.decoder_config import GATE_UP, QKV
from agentgym.settings.config_class import config_class
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["PROJECTIONS", "RATE", "LoraConfig"]

RATE = 10
"""The adapters' learning rate as a multiple of `optimizer.learning_rate`."""


PROJECTIONS = (*QKV, "o_proj", *GATE_UP, "down_proj")
"""The layers that may be adapted: all linear layers but the head."""
EXPERTS = ("w1", "w2", "w3", "gate_up_proj", "input_linear", "output_linear", "fc1", "fc2")
"""Other published names of the projections of experts."""


@config_class
class LoraConfig:
    """Adapters (LoRA) that are trained in place of the weights."""

    rank: int = 0
    """Rank of the adapters (peft's r), such as 8 or 32; 0 trains all weights."""
    alpha: float = 32.0
    """The output of an adapter is scaled by `alpha / rank` (peft's lora_alpha)."""
    target_modules: tuple[str, ...] = PROJECTIONS
    """The linear layers that are adapted, those of experts too, by their published names; by default all but the
    head."""
    learning_rate: float | None = None
    """The adapters' learning rate; None takes ten times `optimizer.learning_rate`, the rate for training all weights
    (Schulman et al. 2025)."""
    seed: int | None = None
    """The adapters' first values follow from it; None is the seed of the run."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"lora.rank is 8 or 32 as a rule, or 0 to train all weights; got {self.rank}")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ConfigError(f"lora.alpha must be above 0, got {self.alpha}")
        for name in self.target_modules:
            if name not in (*PROJECTIONS, *EXPERTS):
                hint = nearest(name, PROJECTIONS) or "."
                raise ConfigError(
                    f"no module {name!r} for lora.target_modules{hint} Known, and all of them where it is left out:"
                    f" {', '.join(PROJECTIONS)}; and of experts {', '.join(EXPERTS)}"
                )
        if not self.target_modules:
            raise ConfigError(f"lora.target_modules names nothing to adapt; known: {', '.join(PROJECTIONS)}")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ConfigError(f"lora.learning_rate must be above 0, got {self.learning_rate}")

    def optimizer_settings(self, optimizer: OptimizerConfig) -> OptimizerConfig:
        """The optimizer's settings, with the adapters' learning rate if adapters are trained."""
        if not self.rank:
            return optimizer
        return replace(optimizer, learning_rate=self.learning_rate or RATE * optimizer.peak_rate)
