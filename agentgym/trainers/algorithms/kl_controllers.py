"""The controllers of the coefficient of a KL penalty."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from agentgym.errors import ConfigError
from agentgym.settings.functions import check_above_zero, check_at_least

__all__ = ["AdaptiveKL", "FixedKL", "KLController"]

MAX_ERROR = 0.2  # the bound of Ziegler et al. 2019


@dataclass(frozen=True)
class FixedKL:
    """A constant coefficient, at least 0."""

    coefficient: float

    def __post_init__(self) -> None:
        check_at_least(0, self, "coefficient")

    def update(self, kl: float, num_episodes: int) -> FixedKL:
        """Returns itself."""
        return self


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """A coefficient that moves until the divergence is the target: a proportional controller in log space.

    Ziegler et al. 2019 (Fine-Tuning Language Models from Human Preferences), section 2.2:
    `beta <- beta * (1 + error * n / horizon)` with `error = clip(kl / target - 1, -0.2, 0.2)`. The paper's constant 0.1
    is n / horizon, a step's episodes over the horizon, as in its code and in verl.

    Example: coefficient 0.1, target 6, horizon 10000: a step of 1000 episodes with a divergence of 12 gives 0.102.
    """

    coefficient: float
    """The weight of the penalty, above 0."""
    target: float
    """The target in nats, in the same unit (per token or per episode) as the `kl` of `update`; above 0."""
    horizon: int
    """Episodes over which an error at its bound moves the coefficient by about a fifth; at least 1."""

    def __post_init__(self) -> None:
        check_above_zero(self, "coefficient", "target")
        check_at_least(1, self, "horizon")

    def update(self, kl: float, num_episodes: int) -> AdaptiveKL:
        """The controller after a step of `num_episodes`; raises ConfigError for a step that is five horizons long."""
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        factor = 1 + error * num_episodes / self.horizon
        if not factor > 0:
            raise ConfigError(f"a step of {num_episodes} episodes needs a horizon above {num_episodes // 5} episodes")
        return replace(self, coefficient=self.coefficient * factor)


KLController: TypeAlias = FixedKL | AdaptiveKL
"""Sets the coefficient of a penalty from the measured divergence; immutable, `update` returns the next one."""
