"""The settings of the learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from agentgym.cores import num_cores
from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.fsdp import FsdpConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.mesh import MeshConfig
from agentgym.trainers.settings.router import RouterConfig

__all__ = ["CPU_TOKENS", "LearnerConfig"]

CPU_TOKENS = 2048
"""The tokens of a forward pass where none are set and no GPU computes it."""


@config_class
class LearnerConfig:
    """The loss, the optimizer steps on each batch, and their micro-batches."""

    loss: str | None = None
    """The policy loss, by its name in `LOSSES`, such as `ppo_clip`, `gspo` or `cispo`, or your own as
    `path/to/file.py:name` or `package.module:name`; None is that of the algo, or `ppo_clip`."""
    loss_settings: Mapping[str, object] | None = None
    """The settings of the loss by their names, such as clip_high=0.28; others have their defaults. None takes those of
    the algo."""
    epochs: int = 1
    """Passes over the episodes of a step."""
    minibatches: int = 1
    """Parts that a step's episodes are split into, with an optimizer step on each."""
    correction: str | None = None
    """The off-policy correction, by its name in `CORRECTIONS`, such as tis_token or icepop, or your own as
    `path/to/file.py:name`: the policy loss takes its ratio against logprobs recomputed with the weights before the
    step, and is weighted by how far those are from the sampled ones. None takes the sampled logprobs themselves as the
    ratio's denominator, which corrects them as far as the clip goes."""
    correction_settings: Mapping[str, object] = field(default_factory=dict)
    """The settings of the correction, such as cap=2.0."""
    rejected_episodes: Literal["count", "leave_out"] = "count"
    """The use of episodes of which the correction keeps no token. `count` keeps them in the baselines of their groups
    and in the denominators of the loss, as verl does; `leave_out` treats them as if they had failed, for one more
    forward pass."""
    kl: KLConfig = field(default_factory=KLConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    entropy_coefficient: float = 0.0
    """The weight of the entropy bonus."""
    ema_decay: float | None = None
    """Keeps an exponential moving average of the weights, in float32, that retains this share of itself at each
    optimizer step, such as 0.99. `agentgym export --ema` writes it. None keeps none."""
    micro_batch_tokens: int | None = None
    """Tokens of one forward pass; rows are never split. Ranks that share their passes (`mesh`) have them together. None
    is 2,048; in one process on a GPU it is up to 16,384, as its memory allows, and on a CPU, of 67 million parameters
    or more, 512 or 1,024 if this hardly computes a shared prefix again."""
    device: str = "cpu"
    """The device on which a run in one process keeps the model, learns and, with engine local, samples: `cpu`, `cuda`,
    `cuda:1`. On a cluster, ray.gpus_per_learner and ray.gpus_per_engine set it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The type in which a run computes forward and backward passes, and in one process keeps the model and samples;
    `auto` is bfloat16 on a GPU, where float32 takes several times as long, and float32 on a CPU. With bfloat16 the
    optimizer steps on float32 weights; gradients and logprobs are float32 either way."""
    threads: int | None = None
    """CPU threads, each with micro-batches of its own; None is one per core, at most 8. Never changes a result. A model
    of 67 million parameters or more is computed by all threads together, and their number may change its rounding.
    With several ranks, each computes in one thread, with torch's own settings."""
    shares: int | None = None
    """Shares of a step, about equally costly, whose gradients are summed separately and then together; None is one per
    rank. A run in one process with 2 has the bits of two ranks that keep `fsdp.gradients` whole and clip nothing."""
    head_kernel: HeadKernel = "torch"
    """The kernel that computes logprobs and entropies from final states: `torch` in chunks, with a kernel of ours on a
    GPU, or `liger`, Liger's fused linear cross-entropy, which is one kernel on Hopper GPUs (in bfloat16) and chunks of
    its own elsewhere."""
    activation_checkpointing: bool = False
    """Recomputes each layer's inner states in the backward pass instead of keeping them: a third more arithmetic, and
    one state per layer and token in memory."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """The type of forward and backward passes: `dtype`, with `auto` decided by the device."""
        if self.dtype == "auto":
            return "bfloat16" if self.device.startswith("cuda") else "float32"
        return self.dtype

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "micro_batch_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ConfigError(f"ema_decay is above 0 and below 1, such as 0.99, got {self.ema_decay}; None keeps none")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads is at least 1, got {self.threads}")
        if self.shares is not None and self.shares < 1:
            raise ConfigError(f"shares is at least 1, got {self.shares}")
        if self.correction is None and self.rejected_episodes != "count":
            raise ConfigError("rejected_episodes are those of a correction that rejects: name it with correction")
        if self.correction is None and self.correction_settings:
            raise ConfigError("correction_settings are those of a correction: name it with correction")
        if self.lora.rank and self.mesh.tensor > 1:
            raise ConfigError(
                "learner.lora is not split by learner.mesh.tensor: leave one out, or use learner.mesh.sequence"
            )

    def check_shares(self, num_ranks: int) -> None:
        """Raises ConfigError if `shares` differs from the number of shares on `num_ranks`."""
        num_shares = self.mesh.data(num_ranks)
        if self.shares not in (None, num_shares):
            remedy = f"leave learner.shares out, or give the run as many learners as shares ({self.shares})"
            raise ConfigError(f"learner.shares is {self.shares}, and {num_ranks} ranks have {num_shares}: {remedy}")

    @property
    def pass_tokens(self) -> int:
        """The tokens of one forward pass."""
        return self.micro_batch_tokens or CPU_TOKENS

    @property
    def num_threads(self) -> int:
        """The CPU threads that learn: `threads`, or one per core that this process may use, at most 8."""
        return self.threads or min(8, num_cores())

    @property
    def loss_name(self) -> str:
        """The name of the loss that is minimized."""
        return self.loss or "ppo_clip"

    @property
    def needs_first_weights(self) -> bool:
        """True if the weights that the run began with stay in memory: as the base of adapters, or as a reference."""
        compares = self.kl.coefficient or self.loss == "preference"
        return bool(self.lora.rank or (compares and self.kl.reference is None))

    @property
    def steps_per_batch(self) -> int:
        """The number of optimizer steps on the episodes of one step."""
        return self.epochs * self.minibatches


HeadKernel = Literal["torch", "liger"]
