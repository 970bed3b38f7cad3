"""The settings of a plan: those of a training run that its memory depends on, and its GPUs, episodes and engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_at_least
from agentgym.trainers.settings.cluster import ClusterConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.speed.gpus import GPUS, gpu_named

__all__ = ["BYTES", "EngineSpec", "EpisodeSpec", "GpuSpec", "PlanConfig"]

BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
"""The bytes of a number, by its type."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """A GPU's memory."""

    name: str = "H100"
    """H100, H200, B200, A100, L40S, ..."""
    memory_gib: float | None = None
    """The memory of a GPU; None is the vendor's figure."""
    runtime_gib: float = 3.0
    """The memory that drivers and libraries take, in GiB."""

    def __post_init__(self) -> None:
        check_above_zero(self, "memory_gib", where="gpu.")
        check_at_least(0, self, "runtime_gib", where="gpu.")
        if self.memory_gib is None and gpu_named(self.name) is None:
            raise ConfigError(
                f"the memory of a GPU {self.name!r} is not known (that of {', '.join(GPUS)} is): name one of these, or"
                " give --gpu.memory-gib"
            )

    @property
    def memory(self) -> float:
        """The bytes of its memory."""
        gpu = gpu_named(self.name)
        return GIB * (self.memory_gib or (gpu.memory_gib if gpu else 0.0))

    @property
    def runtime(self) -> float:
        """The bytes that drivers and libraries take."""
        return GIB * self.runtime_gib


@dataclass(frozen=True, kw_only=True)
class EpisodeSpec:
    """An average episode."""

    prompt_tokens: int = 1000
    """The tokens of the first prompt, which a group shares."""
    reply_tokens: int = 400
    """The tokens that are sampled in a turn."""
    tool_tokens: int = 200
    """The tokens that answer a reply; the last reply has no answer."""
    turns: int = 4
    """The replies of an episode."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "prompt_tokens", "reply_tokens", "turns", where="episode.")
        check_at_least(0, self, "tool_tokens", where="episode.")

    @property
    def tokens(self) -> int:
        """The tokens of a whole episode."""
        return self.prompt_tokens + self.own_tokens

    @property
    def own_tokens(self) -> int:
        """The tokens after the prompt, which an episode does not share."""
        return self.turns * self.reply_tokens + (self.turns - 1) * self.tool_tokens


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The model and memory of an engine, such as a server of SGLang or vLLM."""

    dtype: Literal["bfloat16", "float32", "float8"] = "bfloat16"
    """The type of the weights (`server.dtype` of a run); keys and values are at least bfloat16."""
    tensor_parallel: int = 1
    """The number of GPUs of an engine."""
    memory_fraction: float = 0.9
    """The share of a GPU's memory that an engine may take."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "tensor_parallel", where="engine.")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"engine.memory_fraction must be a share above 0, got {self.memory_fraction}")

    @property
    def weight_bytes(self) -> int:
        """The bytes of a weight."""
        return BYTES[self.dtype]

    @property
    def cache_bytes(self) -> int:
        """The bytes of a number in the KV cache."""
        return max(BYTES["bfloat16"], BYTES[self.dtype])


@config_class
class PlanConfig:
    """The settings of a training run that its memory depends on."""

    model: str
    """A size (0.6B, 1.7B, 4B, 7B, 8B, 14B, 32B, 70B, 72B), a name such as Llama-3.1-8B, `embedded`, or a folder with a
    config.json."""
    gpu: GpuSpec = field(default_factory=GpuSpec)
    tasks: int = 16
    """The tasks of a step."""
    group_size: int = 8
    """The episodes of a task."""
    episode: EpisodeSpec = field(default_factory=EpisodeSpec)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ray: ClusterConfig = field(default_factory=ClusterConfig)
    engine: EngineSpec = field(default_factory=EngineSpec)

    def __post_init__(self) -> None:
        check_at_least(1, self, "tasks", "group_size")
        self.learner.check_shares(self.ray.learners)
        if self.is_colocated and self.engine.tensor_parallel > 1:
            raise ConfigError("ray.layout colocated has an engine on each GPU: leave engine.tensor_parallel out")

    @property
    def ranks(self) -> int:
        """The number of GPUs that share the learner."""
        return self.ray.learners

    @property
    def is_colocated(self) -> bool:
        """True if each GPU has a learner rank and an engine."""
        return self.ray.layout == "colocated"

    @property
    def weights_dtype(self) -> str:
        """The type of the learner's weights: float32 on ranks, and in one process that of its passes."""
        return "float32" if self.ranks > 1 else self.compute_dtype

    @property
    def compute_dtype(self) -> str:
        """The type of the learner's forward and backward passes, by default bfloat16 on a GPU."""
        return "bfloat16" if self.learner.dtype == "auto" else self.learner.dtype

    @property
    def compute_bytes(self) -> int:
        """The bytes of a number in the learner's forward and backward pass."""
        return BYTES[self.compute_dtype]
