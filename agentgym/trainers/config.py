"""Everything a training run can be told, composed of the parts' own configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Literal, TypeVar, get_type_hints

from agentgym.engines.hf import HfEngineConfig
from agentgym.errors import ConfigError, nearest
from agentgym.rollout.limits import Limits, SamplingConfig
from agentgym.rollout.sampler import SamplerConfig
from agentgym.trainers.learner import LearnerConfig
from agentgym.trainers.optimizer import OptimizerConfig

__all__ = ["TrainConfig", "config_from_mapping"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. Every step plays `tasks` x `group_size` episodes and makes one optimizer step."""

    env: str
    """Environment id, `package.module:Class`, or `path/to/file.py:Class`."""
    env_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Keywords of the environment's class, such as level=2."""
    algo: Literal["grpo", "dr_grpo"] = "grpo"
    """Advantage estimator: group-normalized with (grpo) or without (dr_grpo) division by the deviation."""
    model: str = "embedded"
    """`embedded`, or a folder with a model and its tokenizer."""
    engine: Literal["hf"] = "hf"
    """What samples: `hf` is the trained model itself, in process."""
    seed: int = 0
    """Every random number of the run follows from it."""
    steps: int = 40
    """Optimizer steps."""
    tasks: int = 16
    """Tasks a step; each is played by one group."""
    group_size: int = 8
    """Episodes of one task."""
    allow_single: bool = False
    """Accepts a group size of 1, whose advantages are all 0."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    """How token losses become one number."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    limits: Limits = field(default_factory=lambda: Limits(max_turns=64, turn_tokens=64))
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sampler: SamplerConfig = field(default_factory=lambda: SamplerConfig(concurrency=128))
    hf: HfEngineConfig = field(default_factory=HfEngineConfig)
    max_mismatch: float = 0.05
    """Nats; training refuses to go on when trainer and engine differ by more on a token that was just sampled."""
    eval_episodes: int = 200
    """Held-out tasks played before and after training; 0 plays none."""
    checkpoint_every: int = 20
    """Steps between checkpoints; the last step always makes one."""
    max_minutes: float | None = None
    """Ends training after this time, with a checkpoint; None goes by `steps` alone."""

    def __post_init__(self) -> None:
        for name in ("steps", "tasks", "group_size", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.eval_episodes < 0:
            raise ConfigError(f"eval_episodes must be at least 0, got {self.eval_episodes}")
        if self.group_size == 1 and not self.allow_single:
            raise ConfigError(
                f"group_size 1 has no baseline: {self.algo} would give every episode an advantage of 0."
                " Use 2 or more (8 is usual), or allow_single to accept it"
            )
        if self.sampling.temperature == 0:
            raise ConfigError("temperature 0 samples the same reply for the whole group; train at 1.0")
        if self.sampling.top_p != 1.0 or self.sampling.top_k:
            raise ConfigError(
                "top_p and top_k cut the distribution that is sampled from, and the trainer's logprobs are those of the"
                " whole one; train with top_p 1 and top_k 0"
            )

    @property
    def episodes_per_step(self) -> int:
        """Episodes behind one optimizer step."""
        return self.tasks * self.group_size


C = TypeVar("C")


def config_from_mapping(kind: type[C], given: Mapping[str, object], where: str = "") -> C:
    """A configuration from nested mappings, such as a YAML file; raises ConfigError naming the nearest right key."""
    if not is_dataclass(kind):
        raise ConfigError(f"{where or 'the configuration'} holds no settings of its own")
    known = {one.name for one in fields(kind)}
    hints = get_type_hints(kind)
    values: dict[str, object] = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"unknown setting {where + key!r}{nearest(key, known) or '.'} Known: {', '.join(sorted(known))}"
            )
        part = hints[key]
        if isinstance(part, type) and is_dataclass(part):
            if not isinstance(value, Mapping):
                raise ConfigError(f"setting {where + key!r} holds settings of its own, got {value!r}")
            value = config_from_mapping(part, value, f"{where}{key}.")
        values[key] = value
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"the configuration cannot be read: {error}") from error
