"""The settings for the use of servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_at_least

__all__ = ["COMMAND_S", "EngineServing", "PauseMode", "ServingSettings"]

COMMAND_S = 600.0
"""Seconds that one command to a server (a bucket of weights, a flush) may take."""

PauseMode = Literal["abort", "in_place", "retract"]


@config_class
class ServingSettings:
    """The use of running servers."""

    pause: PauseMode = "retract"
    """The effect of a pause on requests in flight. `abort` ends them, and the rollout continues from their exact ids.
    `retract` keeps them waiting and recomputes their cache under the new weights. `in_place` keeps their old cache too:
    the fastest, but what they sample next is of neither policy alone, as the mismatch shows."""
    sync: Literal["memory", "disk", "broadcast"] = "memory"
    """The path of new weights: `memory` in requests (as handles on one GPU), `disk` by a folder that both sides reach,
    `broadcast` by a process group (NCCL on GPUs, where it is untested; Gloo on CPU)."""
    sleep: bool = False
    """Frees the GPU's memory of weights and cache while the learner learns, for a server on the learner's GPU. Weights
    wait in the CPU's memory. Launched servers get the options for it; a running one needs them, and no other client."""
    stream: bool = False
    """Reads replies as they are sampled, so that what a dying server sampled is kept. Costs time per token."""
    request_s: float = 600.0
    """Seconds that one reply may take."""

    def __post_init__(self) -> None:
        if self.pause not in ("abort", "in_place", "retract"):
            raise ConfigError(f'pause is "abort", "in_place" or "retract", got {self.pause!r}')
        check_above_zero(self, "request_s")


@dataclass(frozen=True, kw_only=True)
class EngineServing(ServingSettings):
    """The settings of an engine: those of its run, what follows from the run, and what no run changes."""

    record_experts: bool = False
    """Asks SGLang for the experts of a mixture that computed each token (its --enable-return-routed-experts, which
    servers that we launch get)."""
    bucket_mb: int = 512
    """Megabytes of tensors in one message of a weight update: messages cost next to nothing then, and both sides need
    little more memory than without."""
    verify_sync: bool = True
    """Compares the servers' checksums with those of the sent weights after every update."""
    max_retries: int = 3
    """The number of times that a request is sent again after an error of a live server; a dead one costs none."""

    def __post_init__(self) -> None:
        ServingSettings.__post_init__(self)
        check_above_zero(self, "bucket_mb")
        check_at_least(0, self, "max_retries")

    @classmethod
    def of(cls, settings: ServingSettings, **changes: bool) -> EngineServing:
        """Returns the settings of the engine of a run with `settings`, with changes."""
        return cls(**{**vars(settings), **changes})
