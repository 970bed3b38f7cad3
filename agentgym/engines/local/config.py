"""The settings of the in-process engine."""

from __future__ import annotations

from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least

__all__ = ["LocalEngineConfig", "LocalSettings"]


@config_class
class LocalSettings:
    """The size of the in-process engine."""

    num_slots: int | None = None
    """Requests that run at once; between its turns a session keeps its slot until another one needs it. None is 128, or
    as many as fit into half of the free memory, without what a learner in the same process will take."""
    max_step_tokens: int = 512
    """Tokens computed in one step; a longer prompt is read over several steps, while others continue sampling."""
    threads: int | None = None
    """CPU threads. A model under 20 million parameters is sampled from by so many workers, each of which has a part of
    the slots, 16 at least (None is two, or one on a single core); of a larger one they share each operator (None is
    torch's default). It changes no reply. The matrix products of the whole process use as many threads as an operator
    of the engine (a property of MKL)."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_slots", "max_step_tokens", "threads", where="local.")


@config_class
class LocalEngineConfig(LocalSettings):
    """The settings of a `LocalEngine`: its size, and what follows from the run that it samples for."""

    window: int | None = None
    """Tokens of prompt and reply together; None is the model's context window."""
    keep_idle_s: float = 0.5
    """Seconds that a session between two turns keeps its slot while others wait for one. It never changes a reply."""
    record_experts: bool = False
    """Reports the experts of a mixture that computed each token, which the learner then computes it with."""

    def __post_init__(self) -> None:
        LocalSettings.__post_init__(self)
        check_at_least(1, self, "window", where="local.")
