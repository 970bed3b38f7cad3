"""What a plan is asked about."""

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
    """One device. What is not given is the vendor's figure, or that of the measurement."""

    name: str | None = None
    """H100, H200, B200, A100, L40S, ...; None is the measured device, or else an H100."""
    memory_gib: float | None = None
    """Its memory."""
    tflops: float | None = None
    """10^12 operations a second, at most, in the type that is computed in."""
    memory_gb_s: float | None = None
    """10^9 bytes a second from its memory."""
    link_gb_s: float | None = None
    """10^9 bytes a second to another GPU of its machine, one direction."""
    network_gb_s: float = 50.0
    """10^9 bytes a second to a GPU of another machine; 50 is a 400 Gb/s port for each GPU."""
    per_node: int = 8
    """GPUs of a machine."""

    def __post_init__(self) -> None:
        tiny = 1e-9
        _check("gpu.", self, {"memory_gib": tiny, "tflops": tiny, "memory_gb_s": tiny, "link_gb_s": tiny})
        _check("gpu.", self, {"network_gb_s": tiny, "per_node": 1})


@dataclass(frozen=True, kw_only=True)
class EpisodeSpec:
    """What an average episode is like."""

    prompt_tokens: int = 1000
    """Of the first prompt, which a group shares."""
    reply_tokens: int = 400
    """Sampled in a turn."""
    tool_tokens: int = 200
    """Of what answers a reply; none follows the last one."""
    turns: int = 4
    tool_s: float = 1.0
    """Seconds from a reply to the next request: tools and environment, waiting for nothing of ours."""
    host_ms: float = 1.0
    """Milliseconds of a worker's core in a turn: chat template, parsing, bookkeeping, an environment on its thread."""
    spread: float = 2.0
    """The longest episode of a step, in average ones: at max_staleness 0 all wait for it."""

    def __post_init__(self) -> None:
        _check("episode.", self, {"prompt_tokens": 1, "reply_tokens": 1, "turns": 1, "spread": 1})
        _check("episode.", self, {"tool_tokens": 0, "tool_s": 0, "host_ms": 0})

    @property
    def tokens(self) -> int:
        """Of a whole episode."""
        return self.prompt_tokens + self.sampled_tokens + self.answer_tokens

    @property
    def sampled_tokens(self) -> int:
        """Of an episode."""
        return self.turns * self.reply_tokens

    @property
    def answer_tokens(self) -> int:
        """Tokens of what answered the replies."""
        return (self.turns - 1) * self.tool_tokens

    @property
    def context(self) -> float:
        """Tokens before an average sampled one."""
        return (
            self.prompt_tokens + (self.turns - 1) * (self.reply_tokens + self.tool_tokens) / 2 + self.reply_tokens / 2
        )


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """How the learner holds and computes its model; it is sharded over all of its GPUs (FSDP)."""

    precision: Literal["mixed", "float32", "bfloat16"] = "mixed"
    """`mixed` computes in bfloat16 and steps on float32 weights; the others have one type for everything."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Two numbers a weight (AdamW), or one a matrix's weight (Muon)."""
    lora_rank: int = 0
    """Rank of adapters on all matrices, which alone are trained; 0 trains the model."""
    micro_batch_tokens: int = 16_384
    """Tokens of a forward pass on one GPU, or on those that share its rows."""
    activation_checkpointing: bool = True
    """Whether the backward pass computes a layer's inner states again."""
    gradients: Literal["whole", "sharded"] = "whole"
    """What a rank holds of the gradients between the micro-batches of a step, where it has several: `whole` ones are
    exchanged once a step, `sharded` ones once a micro-batch."""
    sequence_parallel: int = 1
    """GPUs that share a row's tokens."""
    tensor_parallel: int = 1
    """GPUs that share a layer's matrices."""
    epochs: int = 1
    """How often a step's episodes are gone over."""
    extra_forwards: int = 0
    """Further forward passes: one for a reference model, one for a correction that recomputes logprobs."""
    offload: bool = False
    """Whether weights and optimizer leave the GPU while nothing is learned."""
    threads: int = 1
    """Micro-batches side by side, on a CPU."""

    def __post_init__(self) -> None:
        _check("learner.", self, {"lora_rank": 0, "extra_forwards": 0})
        for name in ("micro_batch_tokens", "sequence_parallel", "tensor_parallel", "epochs", "threads"):
            _check("learner.", self, {name: 1})

    @property
    def compute_bytes(self) -> int:
        """Of a number in forward and backward."""
        return 4 if self.precision == "float32" else 2

    @property
    def weight_bytes(self) -> int:
        """Of a trained weight, and of its gradient and each of its optimizer's numbers."""
        return 2 if self.precision == "bfloat16" else 4


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """How an engine holds its model."""

    dtype: Literal["bfloat16", "float32", "float8"] = "bfloat16"
    """Of weights; keys and values are at least bfloat16."""
    tensor_parallel: int | None = None
    """GPUs of one engine; None is the fewest that hold the weights and leave room."""
    memory_fraction: float = 0.9
    """The share of a GPU's memory that an engine may take."""
    max_running: int | None = None
    """Requests that an engine runs at once; None is what its memory holds."""

    def __post_init__(self) -> None:
        _check("engine.", self, {"tensor_parallel": 1, "max_running": 1})
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"engine.memory_fraction must be a share above 0, got {self.memory_fraction}")

    @property
    def weight_bytes(self) -> int:
        """Of a weight."""
        return BYTES[self.dtype]

    @property
    def cache_bytes(self) -> int:
        """Of a number in the cache."""
        return max(2, BYTES[self.dtype])


@dataclass(frozen=True, kw_only=True)
class MeasureSpec:
    """What is measured of a machine, and how."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is a GPU where torch has one, else the CPU, with as many threads as a learner takes."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is float32 on a CPU and bfloat16 on a GPU."""
    context: int = 512
    """Tokens that a reply is sampled behind, and of a row that is learned from."""
    batches: tuple[int, ...] = (1, 8, 32, 128)
    """Requests that are sampled for at once."""
    compile: bool | None = None
    """Whether the engine's steps run as one graph; None as in training."""

    def __post_init__(self) -> None:
        _check("measuring.", self, {"context": 2})
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"measuring.batches must be positive numbers, got {self.batches}")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """A training run, as far as its memory and its speed go by it."""

    model: str
    """A size (0.6B, 1.7B, 4B, 7B, 8B, 14B, 32B, 70B, 72B), a name such as Llama-3.1-8B, `embedded`, or a folder with a
    config.json."""
    gpus: int = 8
    """GPUs of the run."""
    gpu: GpuSpec = field(default_factory=GpuSpec)
    layout: Literal["auto", "colocated", "disaggregated"] = "auto"
    """`colocated` GPUs play and learn by turns, `disaggregated` ones do one or the other; `auto` is the faster one."""
    learners: int | None = None
    """GPUs that learn, where they do nothing else; None is the best split."""
    tasks: int = 16
    """Tasks of a step."""
    group_size: int = 8
    """Episodes of a task."""
    concurrency: int = 256
    """Live episodes at most."""
    workers: int = 1
    """Processes that play episodes: each has one core for what `episode.host_ms` counts."""
    max_staleness: int = 0
    """Updates that a token may be old; above 0, engines and learners work at the same time where they can."""
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
        """Of a step."""
        return self.tasks * self.group_size
