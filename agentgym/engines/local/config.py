"""The settings of the in-process engine."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym.errors import ConfigError

__all__ = ["LocalEngineConfig"]


@dataclass(frozen=True, kw_only=True)
class LocalEngineConfig:
    """Settings of the in-process engine."""

    num_slots: int | None = None
    """Requests that run at once; between its turns a session keeps its slot until another one needs it. None is 128, or
    as many as fit into half of the free memory, without what a learner in the same process will take."""
    window: int | None = None
    """Tokens of prompt and reply together; None is the model's context window, or in training limits.context_window."""
    max_step_tokens: int = 512
    """Tokens computed in one step; a longer prompt is read over several steps, while others continue sampling."""
    keep_idle_s: float = 0.5
    """Seconds that a session between two turns keeps its slot while others wait for one. It never changes a reply."""
    threads: int | None = None
    """CPU threads. A model under 20 million parameters is sampled from by so many workers, each of which has a part of
    the slots, 16 at least (None is two, or one on a single core); of a larger one they share each operator (None is
    torch's default). It changes no reply. The matrix products of the whole process use as many threads as an operator
    of the engine (a property of MKL)."""
    record_experts: bool = False
    """Reports the experts of a mixture that computed each token, which the learner then computes it with;
    `learner.router.replay` sets it."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "window", "max_step_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of the local engine must be at least 1, got {value}")
