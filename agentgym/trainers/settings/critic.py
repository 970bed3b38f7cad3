"""The settings of the critic."""

from __future__ import annotations

from typing import Literal

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_at_least

__all__ = ["RATE", "CriticConfig"]

RATE = 5
"""A critic's learning rate over `optimizer.learning_rate`."""


@config_class
class CriticConfig:
    """The critic of an advantage that takes values (gae, turn_gae)."""

    trunk: Literal["none", "own", "shared"] | None = None
    """The critic's backbone. `own` starts as a copy of the model and is trained separately; `shared` reads the policy's
    final states, costs next to nothing, and its gradient changes the policy's weights. None is `own` if the advantage
    takes values, else `none`."""
    learning_rate: float | None = None
    """The learning rate of a backbone of its own and its head. None takes five times `optimizer.learning_rate`, since a
    critic that lags credits the past. The policy's other optimizer settings, and its choice of adapters, hold for
    both."""
    coefficient: float = 0.1
    """The weight of the value loss relative to the policy's, if the backbone is shared."""
    clip: float | None = 0.5
    """The largest change of a value in a step that still reduces its error, in units of reward; None for no bound."""
    bootstrap: bool = True
    """Credits an episode that a limit ended (`truncated`) with the critic's value of what might follow. Otherwise it
    ends there with what it had earned: right if the limit is part of the task, such as the turns to win a game in. With
    it, a policy that wanders up to the limit loses nothing but time."""
    warmup_steps: int = 0
    """Steps at the start in which the critic learns and the policy does not; for a backbone of its own."""

    def __post_init__(self) -> None:
        check_above_zero(self, "learning_rate", "coefficient", where="critic.")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"critic.clip must be above 0, or null for no bound, got {self.clip}")
        check_at_least(0, self, "warmup_steps", where="critic.")
        if self.trunk == "shared" and (self.learning_rate is not None or self.warmup_steps):
            raise ConfigError(
                "a critic on the policy's trunk learns with the policy: leave critic.learning_rate and"
                " critic.warmup_steps out, or give it a trunk of its own"
            )

    @property
    def exists(self) -> bool:
        """True if there is a critic."""
        return self.trunk in ("own", "shared")
