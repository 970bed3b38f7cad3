"""The settings of speed measurements and traces."""

from __future__ import annotations

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class

__all__ = ["SpeedConfig"]


@config_class
class SpeedConfig:
    """The peak speed that the speed of a step is compared with."""

    peak_tflops: float | None = None
    """The most that the learner's devices compute, in 10^12 operations a second, for `mfu` in metrics.jsonl. None
    measures a short matrix product at the start on CPU, and takes the vendor's figure of a GPU that is known."""

    def __post_init__(self) -> None:
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ConfigError(f"speed.peak_tflops must be above 0, got {self.peak_tflops}; leave it out to measure it")


@config_class
class ProfileConfig:
    """The steps to trace."""

    steps: tuple[int, ...] = ()
    """Steps whose operators are traced, on all threads, into `profile/step-NNNNNN.json.gz` of the run folder, which
    ui.perfetto.dev opens; --profile alone is step 2. A traced step is slower, and its trace may have 100 MB."""

    def __post_init__(self) -> None:
        if wrong := [step for step in self.steps if step < 1]:
            raise ConfigError(f"profile.steps are steps from 1 on, got {wrong[0]}")
