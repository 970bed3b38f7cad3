"""The settings for the source of an episode's reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentgym.cores import num_cores
from agentgym.errors import ConfigError
from agentgym.rewards.judge import JudgeConfig
from agentgym.rewards.learned import RewardModelConfig
from agentgym.rewards.overlong import OverlongConfig
from agentgym.rewards.remote import RemoteConfig

__all__ = ["Manner", "RewardConfig"]

Manner = Literal["auto", "plain", "batch", "pool", "remote", "judge", "model"]
FUNCTIONS = ("plain", "batch", "pool")
NUM_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """The source of an episode's reward; without one, the environment's reward stays.

    A function, a server, a judge or a model, if set, replaces the environment's reward.
    """

    function: str | None = None
    """A scorer's name (gsm8k, math, exact_match, f1, code, format), `path/to/file.py:name` or `package.module:name`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The function's keyword-only parameters; a reward server gets them with each episode."""
    manner: Manner = "auto"
    """The way of scoring: `plain` in this process, `batch` with all episodes of a step in one call, `pool` in separate
    processes, `remote`, `judge`, `model`. `auto` follows the source; math and code run in a pool, others plain."""
    timeout_s: float = 60.0
    """The seconds that one call of a function or model may take; a server and a judge have their own time-outs."""
    concurrency: int | None = None
    """The calls at the same time; None is 64, or one process per core in a pool."""
    memory_mb: int | None = 4096
    """The memory in MiB that a process of the pool may take beyond its memory at the start; None sets no limit."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """A soft punishment of long episodes, added to the reward of any source."""
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    """A server that computes rewards."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """A judge model at a chat endpoint."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A learned reward model."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be greater than 0, got {self.timeout_s}")
        for name in ("concurrency", "memory_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if len(self.source_names) > 1:
            raise ConfigError(f"an episode has one reward, got {' and '.join(self.source_names)}: leave one")
        wanted = "function" if self.manner in FUNCTIONS else self.manner
        if self.source_names and self.manner != "auto" and wanted not in self.source_names:
            raise ConfigError(f"manner={self.manner} needs a {wanted}, got a {self.source_names[0]}")

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of those of `function`, `remote`, `judge` and `model` that are set."""
        parts = {
            "function": self.function,
            "remote": self.remote.url,
            "judge": self.judge.url,
            "model": self.model.folder,
        }
        return tuple(name for name, part in parts.items() if part)

    def num_calls(self, *, in_processes: bool = False) -> int:
        """Returns the number of calls that may run at the same time."""
        if self.concurrency is not None:
            return self.concurrency
        if not in_processes:
            return NUM_AT_ONCE
        return num_cores()
