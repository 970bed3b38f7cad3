"""The settings for the source of an episode's reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Literal, cast

from agentgym.cores import num_cores
from agentgym.errors import ConfigError
from agentgym.rewards.judge.config import JudgeConfig
from agentgym.rewards.learned import RewardModelConfig
from agentgym.rewards.overlong import OverlongConfig
from agentgym.rewards.remote import RemoteConfig
from agentgym.rewards.weighted import WeightedPart, read_parts
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_at_least

__all__ = ["Manner", "RewardConfig"]

Manner = Literal["auto", "plain", "batch", "pool", "remote", "judge", "model"]
OTHERS = ("remote", "judge", "model")
FUNCTIONS = ("plain", "batch", "pool")
NUM_AT_ONCE = 64


@config_class
class RewardConfig:
    """The source of an episode's reward; without one, the environment's reward stays.

    A function, a server, a judge or a model, if set, replaces the environment's reward.
    """

    function: str | tuple[str, ...] | None = None
    """A scorer's name (gsm8k, math, exact_match, f1, code, format, environment), `path/to/file.py:name` or
    `package.module:name`. Several, each NAME or NAME=WEIGHT, are summed with their weights; `remote`, `judge` and
    `model` may be among them."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The function's keyword-only parameters, of several functions under the name of each; a reward server gets them
    with each episode."""
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
        check_above_zero(self, "timeout_s")
        check_at_least(1, self, "concurrency", "memory_mb")
        if self.function is not None and not isinstance(self.function, str):
            object.__setattr__(self, "function", tuple(self.function))
        set_names = tuple(name for name, is_set in self._other_sources.items() if is_set)
        for part in self.parts:
            if part.name in OTHERS and part.name not in set_names:
                raise ConfigError(f"reward.function names the {part.name}, and reward.{part.name} has none")
        if len(self.source_names) > 1:
            raise ConfigError(f"an episode has one reward, got {' and '.join(self.source_names)}: leave one")
        source = "function" if self.manner in FUNCTIONS else self.manner
        if self.source_names and self.manner != "auto" and source not in self.source_names:
            raise ConfigError(f"manner={self.manner} needs a {source}, got a {self.source_names[0]}")

    @property
    def parts(self) -> tuple[WeightedPart, ...]:
        """The functions with their weights."""
        if self.function is None:
            return ()
        return read_parts((self.function,) if isinstance(self.function, str) else self.function)

    @property
    def is_weighted(self) -> bool:
        """True for several functions, or one with a weight."""
        return len(self.parts) > 1 or any(part.weight != 1 or part.function in OTHERS for part in self.parts)

    def of_part(self, part: WeightedPart) -> RewardConfig:
        """Returns the settings of one of several rewards alone."""
        own = {"judge": JudgeConfig, "remote": RemoteConfig, "model": RewardModelConfig}
        others: dict[str, Any] = {name: kind() for name, kind in own.items() if name != part.function}
        is_function = part.function not in OTHERS
        return replace(
            self,
            function=part.function if is_function else None,
            settings=cast("Mapping[str, object]", self.settings.get(part.name, {})),
            manner=self.manner if is_function else "auto",
            **others,
        )

    @property
    def _other_sources(self) -> dict[str, bool]:
        return {"remote": bool(self.remote.url), "judge": bool(self.judge.url), "model": bool(self.model.folder)}

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of those of `function`, `remote`, `judge` and `model` that are set, and are no part of several."""
        part_names = {part.function for part in self.parts}
        others = [name for name, is_set in self._other_sources.items() if is_set and name not in part_names]
        return ("function", *others) if self.parts else tuple(others)

    def check_repeats(self, num_repeats: int, option: str) -> None:
        """Raises ConfigError if groups are ranked, and an evaluation plays each task less than twice."""
        if self.judge.url and self.judge.unit == "group" and num_repeats < 2:
            raise ConfigError(
                f"a judge that ranks the members of a group (judge.unit=group) needs two of each task, got {option}="
                f"{num_repeats}: set it to 2 or more"
            )

    def num_calls(self, *, in_processes: bool = False) -> int:
        """Returns the number of calls that may run at the same time."""
        if self.concurrency is not None:
            return self.concurrency
        if not in_processes:
            return NUM_AT_ONCE
        return num_cores()
