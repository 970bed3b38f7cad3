"""The settings of a plan: GPUs, episodes, learner, engine and measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentgym.errors import ConfigError

__all__ = ["EngineSpec", "EpisodeSpec", "GpuSpec", "LearnerSpec", "MeasureSpec", "PlanConfig"]

BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}


def _check(where: str, settings: object, least: dict[str, float]) -> None:
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"{where}{name} must be at least {bound:g}, got {value}")


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """A device. A figure that is not given is the vendor's, or the measured one."""

    name: str | None = None
    """H100, H200, B200, A100, L40S, ...; None is the measured device, or an H100 without one."""
    memory_gib: float | None = None
    """The memory of a GPU."""
    tflops: float | None = None
    """The peak, in 10^12 operations a second, in the type that the model computes in."""
    memory_gb_s: float | None = None
    """The bandwidth of its memory, in 10^9 bytes a second."""
    link_gb_s: float | None = None
    """The bandwidth to another GPU of its machine, in 10^9 bytes a second and one direction."""
    network_gb_s: float = 50.0
    """The bandwidth to a GPU of another machine, in 10^9 bytes a second; 50 is a 400 Gb/s port per GPU."""
    per_node: int = 8
    """The number of GPUs of a machine."""

    def __post_init__(self) -> None:
        tiny = 1e-9
        _check("gpu.", self, {"memory_gib": tiny, "tflops": tiny, "memory_gb_s": tiny, "link_gb_s": tiny})
        _check("gpu.", self, {"network_gb_s": tiny, "per_node": 1})


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
    tool_s: float = 1.0
    """Seconds from a reply to the next request: tools and environment, without waiting for engine or worker."""
    host_ms: float = 1.0
    """Milliseconds of a worker's core per turn: chat template, parsing, bookkeeping, an environment on its thread."""
    spread: float = 2.0
    """The longest episode of a step, as a multiple of the average: at max_staleness 0 all wait for it."""

    def __post_init__(self) -> None:
        _check("episode.", self, {"prompt_tokens": 1, "reply_tokens": 1, "turns": 1, "spread": 1})
        _check("episode.", self, {"tool_tokens": 0, "tool_s": 0, "host_ms": 0})

    @property
    def tokens(self) -> int:
        """The tokens of a whole episode."""
        return self.prompt_tokens + self.sampled_tokens + self.answer_tokens

    @property
    def sampled_tokens(self) -> int:
        """The tokens that are sampled in an episode."""
        return self.turns * self.reply_tokens

    @property
    def answer_tokens(self) -> int:
        """The tokens that answer the replies of an episode."""
        return (self.turns - 1) * self.tool_tokens

    @property
    def context(self) -> float:
        """The number of tokens before an average sampled token."""
        return (
            self.prompt_tokens + (self.turns - 1) * (self.reply_tokens + self.tool_tokens) / 2 + self.reply_tokens / 2
        )


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """The learner's model and computation; the model is sharded over all of the learner's GPUs (FSDP)."""

    precision: Literal["mixed", "float32", "bfloat16"] = "mixed"
    """`mixed` computes in bfloat16 and updates float32 weights; the others use one type for everything."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """The optimizer holds two numbers per weight (AdamW), or one per weight of a matrix (Muon)."""
    lora_rank: int = 0
    """The rank of adapters on all matrices, which alone are trained; 0 trains the model."""
    micro_batch_tokens: int = 16_384
    """The tokens of a forward pass on one GPU, or on the GPUs that share its rows."""
    activation_checkpointing: bool = True
    """Recompute a layer's inner states in the backward pass."""
    gradients: Literal["whole", "sharded"] = "whole"
    """The gradients that a rank holds between the micro-batches of a step, if it has several: `whole` ones are
    exchanged once per step, `sharded` ones once per micro-batch."""
    sequence_parallel: int = 1
    """The number of GPUs that share a row's tokens."""
    tensor_parallel: int = 1
    """The number of GPUs that share a layer's matrices."""
    epochs: int = 1
    """The number of passes over a step's episodes."""
    extra_forwards: int = 0
    """Additional forward passes: one for a reference model, one for a correction that recomputes logprobs."""
    offload: bool = False
    """Move weights and optimizer off the GPU while nothing is learned."""
    threads: int = 1
    """The number of micro-batches computed in parallel, on a CPU."""

    def __post_init__(self) -> None:
        _check("learner.", self, {"lora_rank": 0, "extra_forwards": 0})
        for name in ("micro_batch_tokens", "sequence_parallel", "tensor_parallel", "epochs", "threads"):
            _check("learner.", self, {name: 1})

    @property
    def compute_bytes(self) -> int:
        """The bytes of a number in the forward and backward pass."""
        return 4 if self.precision == "float32" else 2

    @property
    def weight_bytes(self) -> int:
        """The bytes of a trained weight, of its gradient, and of each number that the optimizer holds for it."""
        return 2 if self.precision == "bfloat16" else 4


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The model and memory of an engine."""

    dtype: Literal["bfloat16", "float32", "float8"] = "bfloat16"
    """The type of the weights; keys and values are at least bfloat16."""
    tensor_parallel: int | None = None
    """The number of GPUs of an engine; None tries every power of two and takes the fastest that fits."""
    memory_fraction: float = 0.9
    """The share of a GPU's memory that an engine may take."""
    max_running: int | None = None
    """The most requests that an engine runs at once; None is as many as its memory holds."""

    def __post_init__(self) -> None:
        _check("engine.", self, {"tensor_parallel": 1, "max_running": 1})
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"engine.memory_fraction must be a share above 0, got {self.memory_fraction}")

    @property
    def weight_bytes(self) -> int:
        """The bytes of a weight."""
        return BYTES[self.dtype]

    @property
    def cache_bytes(self) -> int:
        """The bytes of a number in the KV cache."""
        return max(2, BYTES[self.dtype])


@dataclass(frozen=True, kw_only=True)
class MeasureSpec:
    """The measurement of a machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is a GPU if torch has one, else the CPU with as many threads as a learner takes."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is float32 on a CPU and bfloat16 on a GPU."""
    context: int = 512
    """The tokens before a sampled reply, and the tokens of a trained row."""
    batches: tuple[int, ...] = (1, 8, 32, 128)
    """The numbers of requests that are sampled for at once."""
    compile: bool | None = None
    """Run the engine's steps as one graph; None as in training."""

    def __post_init__(self) -> None:
        _check("measuring.", self, {"context": 2})
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"measuring.batches must be positive numbers, got {self.batches}")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The settings of a training run that its memory and speed depend on."""

    model: str
    """A size (0.6B, 1.7B, 4B, 7B, 8B, 14B, 32B, 70B, 72B), a name such as Llama-3.1-8B, `embedded`, or a folder with a
    config.json."""
    gpus: int = 8
    """The number of GPUs of the run."""
    gpu: GpuSpec = field(default_factory=GpuSpec)
    layout: Literal["auto", "colocated", "disaggregated"] = "auto"
    """`colocated` GPUs alternate between playing and learning, `disaggregated` ones do one; `auto` is the faster."""
    learners: int | None = None
    """The number of GPUs that only learn, if disaggregated; None is the best split."""
    tasks: int = 16
    """The tasks of a step."""
    group_size: int = 8
    """The episodes of a task."""
    concurrency: int = 256
    """The most episodes that run at once."""
    workers: int = 1
    """The processes that play episodes: each has one core for the work that `episode.host_ms` counts."""
    max_staleness: int = 0
    """The most updates that a token may be old; above 0, engines and learners work at the same time if they can."""
    episode: EpisodeSpec = field(default_factory=EpisodeSpec)
    learner: LearnerSpec = field(default_factory=LearnerSpec)
    engine: EngineSpec = field(default_factory=EngineSpec)

    def __post_init__(self) -> None:
        _check("", self, {"gpus": 1, "learners": 1, "tasks": 1, "group_size": 1, "concurrency": 1})
        _check("", self, {"workers": 1, "max_staleness": 0})
        if self.learners is not None and self.layout == "colocated":
            raise ConfigError("learners is the split of a disaggregated layout: leave it out, or --layout colocated")
        if self.learners is not None and self.learners >= self.gpus:
            raise ConfigError(f"learners {self.learners} of {self.gpus} GPUs leave none to play: name fewer")

    @property
    def episodes(self) -> int:
        """The number of episodes of a step."""
        return self.tasks * self.group_size
