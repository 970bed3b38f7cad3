"""The settings for sampling the replies that are trained on."""

from __future__ import annotations

from agentgym.engines.stop_strings import stop_strings
from agentgym.errors import ConfigError
from agentgym.rollout.limits import SamplingConfig
from agentgym.settings.config_class import config_class

__all__ = ["UNCUT", "TrainSamplingConfig"]

UNCUT = "training draws from the whole distribution, whose logprobs the learner computes"


@config_class
class TrainSamplingConfig:
    """The distribution that replies are drawn from. It is never cut (top_p, top_k, min_p) or penalized, since the
    learner's logprobs are those of the whole one."""

    temperature: float = 1.0
    """The temperature, above 0."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply, such as </answer>, wherever they occur in it; the reply ends with the text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", stop_strings(self.stop))
        if not self.temperature > 0:
            raise ConfigError(
                f"sampling.temperature must be above 0, got {self.temperature}: at 0 the episodes of a group are all"
                " alike; train at 1.0"
            )

    def for_episodes(self, temperature: float | None = None) -> SamplingConfig:
        """Returns the settings for sampling episodes, such as held-out ones with a `temperature` of their own."""
        return SamplingConfig(temperature=self.temperature if temperature is None else temperature, stop=self.stop)
