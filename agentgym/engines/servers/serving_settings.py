"""The settings for the use of servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentgym.errors import ConfigError

__all__ = ["COMMAND_S", "PauseMode", "ServingSettings"]

COMMAND_S = 600.0
"""Seconds that one command to a server (a bucket of weights, a flush) may take."""

PauseMode = Literal["abort", "in_place", "retract"]


@dataclass(frozen=True, kw_only=True)
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
    bucket_mb: int = 512
    """Megabytes of tensors in one message of a weight update."""
    verify_sync: bool = True
    """Compares the servers' checksums with those of the sent weights after every update."""
    stream: bool = False
    """Reads replies as they are sampled, so that what a dying server sampled is kept. Costs time per token."""
    record_experts: bool = False
    """Asks SGLang for the experts of a mixture that computed each token (its --enable-return-routed-experts, which
    servers that we launch get); `learner.router.replay` sets it."""
    request_s: float = 600.0
    """Seconds that one reply may take."""
    max_retries: int = 3
    """The number of times that a request is sent again after an error of a live server."""

    def __post_init__(self) -> None:
        if self.pause not in ("abort", "in_place", "retract"):
            raise ConfigError(f'pause is "abort", "in_place" or "retract", got {self.pause!r}')
        for name in ("bucket_mb", "request_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if self.max_retries < 0:
            raise ConfigError(f"max_retries must be at least 0, got {self.max_retries}")
