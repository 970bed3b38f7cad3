"""How fast a step was, and on what its time was spent."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym.trainers.speed.clock import StepTimes
from agentgym.trainers.speed.memory import peak_gpu_memory_mb, peak_memory_mb
from agentgym.trainers.speed.work import UpdateWork

__all__ = ["OF_THE_MACHINE", "StepSpeed"]

OF_THE_MACHINE = frozenset(
    {
        "generate_share",
        "learn_share",
        "sync_share",
        "rest_share",
        "bubble",
        "mfu",
        "peak_memory_mb",
        "peak_gpu_memory_mb",
    }
)
"""Numbers of a line of metrics.jsonl that two equal runs have otherwise, beside all whose names end in `_s`."""


@dataclass(frozen=True, kw_only=True)
class StepSpeed:
    """The speed of one step, which lasts from the line before to its own; the first one begins with training.

    So what follows a line (a checkpoint, a probe) is the next step's. What an update alone has is None without one.
    """

    step_s: float
    """Seconds."""
    generate_share: float
    """Of the step, waiting for episodes; the four shares add up to 1."""
    learn_share: float
    """Crediting and learning."""
    sync_share: float
    """Bringing the weights to the engine."""
    rest_share: float
    """Recording, checkpoints, probes of parity."""
    bubble: float | None
    """The share in which neither an engine nor the learner had anything to do: all episodes waited for their
    environments, or the loop for a disk. None where requests are sent from other processes, which nobody clocks."""
    sampled_tokens_per_s: float | None
    """Sampled tokens of the step's episodes, over the seconds of generation; in asynchronous training, of the step."""
    trained_tokens_per_s: float | None
    """Targets of the loss, as often as they were gone over, over the seconds of learning."""
    mfu: float | None
    """Model flops utilization of learning: the operations of the model's forward and backward over whole rows, over
    what the device could have computed in the seconds of learning. Sharing prefixes raises it, even above 1."""
    padded_tokens: int | None
    """Tokens of forward passes, were rows padded to the longest of their micro-batch."""
    packed_tokens: int | None
    """Tokens without padding."""
    computed_tokens: int | None
    """Tokens that were computed: prefixes that rows share, once."""
    padding_gain: float | None
    """`padded_tokens / packed_tokens`."""
    sharing_gain: float | None
    """`packed_tokens / computed_tokens`."""
    peak_memory_mb: float
    """MiB that the process has had at most since it began."""
    peak_gpu_memory_mb: float | None
    """MiB that torch has held at most on its GPU; None without one."""

    @classmethod
    def of(cls, times: StepTimes, sampled_tokens: int, work: UpdateWork | None, peak: float | None) -> StepSpeed:
        """The speed of a step of these seconds; `peak` is what the learner's device computes a second at most."""
        whole = times.step_s or 1.0
        able = times.learn_s * peak if peak else 0.0
        gpu = peak_gpu_memory_mb()
        return cls(
            step_s=round(times.step_s, 4),
            generate_share=times.generate_s / whole,
            learn_share=times.learn_s / whole,
            sync_share=times.sync_s / whole,
            rest_share=times.rest_s / whole,
            bubble=None if times.idle_s is None else times.idle_s / whole,
            sampled_tokens_per_s=_rate(sampled_tokens, times.sampling_s),
            trained_tokens_per_s=_rate(work.trained_tokens, times.learn_s) if work else None,
            mfu=_rate(work.flops, able) if work else None,
            padded_tokens=work.padded_tokens if work else None,
            packed_tokens=work.packed_tokens if work else None,
            computed_tokens=work.computed_tokens if work else None,
            padding_gain=_rate(work.padded_tokens, work.packed_tokens) if work else None,
            sharing_gain=_rate(work.packed_tokens, work.computed_tokens) if work else None,
            peak_memory_mb=round(peak_memory_mb(), 1),
            peak_gpu_memory_mb=None if gpu is None else round(gpu, 1),
        )


def _rate(amount: float, over: float) -> float | None:
    return amount / over if over > 0 else None
