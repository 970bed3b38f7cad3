"""The settings of the comparison between the engine's and the trainer's logprobs."""

from __future__ import annotations

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least

__all__ = ["ParityConfig"]


@config_class
class ParityConfig:
    """The check that ends training if the engine samples from another distribution than the one that is trained."""

    max_mismatch: float | None = None
    """The most nats between the trainer's and the engine's logprob of a token that was just sampled. None takes ten
    times the difference at the start, at least 0.001, where both sides compute in float32. Elsewhere rounding decides
    single tokens, and `max_rms` is the bound."""
    max_rms: float | None = None
    """The most nats between both logprobs as the root of the mean square, each token counted up to 1 nat, where a side
    computes in another type than float32. None allows two and a half times the median of the start and the last
    ten steps, at least 0.01 and at most 0.1, or 0.2 for mixtures of experts."""
    every: int = 10
    """Steps between probes: fresh replies whose logprobs are recomputed. Every step's own tokens are compared anyway,
    before they are trained on."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "every", where="parity.")
        for name in ("max_mismatch", "max_rms"):
            bound = getattr(self, name)
            if bound is not None and not bound > 0:
                raise ConfigError(f"parity.{name} must be greater than 0, got {bound}")
