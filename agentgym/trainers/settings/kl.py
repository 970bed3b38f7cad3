"""The settings of the KL penalty."""

from __future__ import annotations

from typing import Literal

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.trainers.algorithms.kl_controllers import AdaptiveKL, FixedKL, KLController

__all__ = ["KLConfig"]

WHOLE = "jsd"
"""The penalty that compares whole distributions."""


@config_class
class KLConfig:
    """The penalty for a distance from another model: the one that training began with, or a teacher."""

    coefficient: float = 0.0
    """The weight of the penalty; 0 keeps no reference model."""
    reference: str | None = None
    """The other model: a folder, a GGUF file or an id of the Hugging Face hub, with the same tokenizer, such as a
    teacher to distill from; None is the model that training began with."""
    penalty: str = "k3"
    """The penalty's name in `KL_PENALTIES`, or your own as `path/to/file.py:name` or `package.module:name`. In the
    loss: k2, k3 or k3_st (k1 has no gradient in expectation, so it regularizes nothing there); in the reward: k1. These
    look at the sampled ids; `jsd` compares the whole vocabulary at each of them, for distillation."""
    beta: float = 1.0
    """The weight of the reference in the mixture of `jsd`: 1 is KL(policy || reference), 0 KL(reference || policy), 0.5
    the Jensen-Shannon divergence (GKD, Agarwal et al. 2024)."""
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
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(f"kl.beta is in [0, 1], got {self.beta}")
        if self.penalty == WHOLE and self.place == "reward":
            raise ConfigError("kl.penalty jsd compares whole distributions, which is a loss: leave kl.place at loss")
        if self.reference is not None and not self.coefficient:
            raise ConfigError("kl.reference is compared with the policy by kl.coefficient, and that is 0: set it to 1")
        self.controller()

    @property
    def compares_whole(self) -> bool:
        """True if the whole vocabulary is compared."""
        return self.coefficient > 0 and self.penalty == WHOLE

    def controller(self) -> KLController:
        """The controller of the coefficient at the start of the run."""
        if self.target is None:
            return FixedKL(coefficient=self.coefficient)
        return AdaptiveKL(coefficient=self.coefficient, target=self.target, horizon=self.horizon)
