"""The settings of a run's tasks: mixes, curriculum, replay, and groups that are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least, check_pair, with_settings
from agentgym.trainers.tasks.curriculum import CURRICULA, Curriculum
from agentgym.trainers.tasks.mix import read_mix

__all__ = ["CurriculumConfig", "PracticeConfig", "ReplayConfig"]


@config_class
class CurriculumConfig:
    """Tasks of several levels, whose shares follow the success of recent groups."""

    method: Literal["off", "steps", "learnability"] = "off"
    """`steps` trains on one level and moves up or down by the success of its last groups (thresholds, as in automatic
    domain randomization); `learnability` trains on all levels, each by p(1 - p), p being its success."""
    by: str = "level"
    """The environment's keyword that sets the level."""
    values: tuple[int | float | str, ...] = ()
    """The values of the keyword, the easiest first."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The settings of the method: raise_at=0.8, lower_at=0.2 and window=16 of `steps`, explore=0.1 and keep=0.9 of
    `learnability`."""

    def __post_init__(self) -> None:
        if self.method == "off":
            if name := "values" if self.values else "settings" if self.settings else "":
                raise ConfigError(
                    f"curriculum.{name} are given, and curriculum.method is off: add steps or learnability"
                )
            return
        if len(set(self.values)) < max(2, len(self.values)):
            raise ConfigError(
                f"a curriculum takes two or more different curriculum.values of {self.by!r}, the easiest first, such as"
                f" 1 2 3 4; got {' '.join(map(str, self.values)) or 'none'}"
            )
        self.make(len(self.values))

    def make(self, num_levels: int) -> Curriculum:
        """Returns the curriculum at the start of the run; raises ConfigError for a setting that it does not take."""
        make = CURRICULA[self.method]
        return with_settings(f"curriculum.method {self.method}", make, self.settings)(num_levels)


@config_class
class ReplayConfig:
    """Earlier tasks that are played again."""

    share: float = 0.0
    """The share of a step's tasks that are earlier ones, as long as some are remembered; 0 replays none."""
    success: tuple[float, float] = (0.0, 0.5)
    """Tasks are remembered if their group had at least the first and at most the second success; 0.01 0.5 leaves out
    unsolved ones."""
    memory: int = 256
    """The most tasks that are remembered; the oldest is forgotten first."""
    max_replays: int = 3
    """The most times that a task is played again."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < 1.0:
            raise ConfigError(
                f"replay.share is a share in [0, 1), got {self.share:g}: new tasks have to come from somewhere"
            )
        check_pair("replay.success", self.success)
        min_rate, max_rate = self.success
        if not 0.0 <= min_rate <= max_rate <= 1.0:
            raise ConfigError(
                f"replay.success is two rates of success from 0 to 1, the lower first; got {min_rate:g} {max_rate:g}"
            )
        check_at_least(1, self, "memory", "max_replays", where="replay.")


@config_class
class PracticeConfig:
    """The choice of a step's tasks, and of the groups that it learns from."""

    mix: Mapping[str, float | Mapping[str, object]] = field(default_factory=dict)
    """Several environments with their weights, such as TextGame-v0=2 GuessNumber-v0=1 (`--mix` for short). In YAML, a
    weight may be a mapping of `weight`, `kwargs`, `levels` (its own curriculum.values, [] for none) and `env` (if
    the name is one of your own)."""
    filter: Literal["off", "reward", "success"] | None = None
    """The groups that are left out and replaced by further ones: those with equal rewards, or those whose episodes all
    succeeded or all failed (dynamic sampling of DAPO). None is the default of the algo, mostly off."""
    max_refills: int = 8
    """The most rounds of further groups per step, with `filter`; after them the step uses the groups that there are."""
    sampler: str | None = None
    """Your own choice of the tasks of each step, a `TaskSampler` as `path/to/file.py:Class`."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)

    def __post_init__(self) -> None:
        read_mix(self.mix)
        check_at_least(1, self, "max_refills")
