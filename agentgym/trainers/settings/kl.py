"""The settings of the KL penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentgym.errors import ConfigError
from agentgym.trainers.algorithms.kl_controllers import AdaptiveKL, FixedKL, KLController

__all__ = ["KLConfig"]


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The KL penalty that keeps the policy near the model that training began with."""

    coefficient: float = 0.0
    """The weight of the penalty; 0 keeps no reference model."""
    penalty: str = "k3"
    """The penalty's name in `KL_PENALTIES`, or your own as `path/to/file.py:name` or `package.module:name`. In the
    loss: k2, k3 or k3_st (k1 has no gradient in expectation, so it regularizes nothing there); in the reward: k1."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds the penalty to each token's loss; `reward` takes it off each token's reward before advantages are
    computed, as PPO for language models began (Ziegler et al. 2019)."""
    target: float | None = None
    """The divergence, in nats a token, that the coefficient is adapted to reach (`AdaptiveKL`); None keeps the
    coefficient as it is."""
    horizon: int = 10_000
    """Episodes over which a divergence far from the target moves the coefficient by a fifth."""

    def __post_init__(self) -> None:
        if self.target is not None and not self.coefficient > 0:
            raise ConfigError(f"kl.target moves a coefficient above 0, got kl.coefficient={self.coefficient}")
        self.controller()

    def controller(self) -> KLController:
        """The controller of the coefficient at the start of the run."""
        if self.target is None:
            return FixedKL(coefficient=self.coefficient)
        return AdaptiveKL(coefficient=self.coefficient, target=self.target, horizon=self.horizon)
