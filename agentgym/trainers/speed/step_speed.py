"""The speed of a step, and the shares of its time."""

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
"""The numbers in metrics.jsonl that differ between two equal runs, besides all whose names end in `_s`."""


@dataclass(frozen=True, kw_only=True)
class StepSpeed:
    """The speed of one step, which lasts from the previous line to its own; the first one begins with training.

    So work after a line (a checkpoint, a probe) belongs to the next step. Numbers of an update are None without one.
    """

    step_s: float
    """The seconds of the step."""
    generate_share: float
    """The share of the step spent waiting for episodes; the four shares add up to 1."""
    learn_share: float
    """The share of crediting and learning."""
    sync_share: float
    """The share of sending the weights to the engine."""
    rest_share: float
    """The share of recording, checkpoints and parity probes."""
    bubble: float | None
    """The share in which neither an engine nor the learner had work: all episodes waited for their environments, or the
    loop for a disk. None if requests are sent from other processes, which are not clocked."""
    sampled_tokens_per_s: float | None
    """The sampled tokens of the step's episodes over the seconds of generation, or of the step if asynchronous."""
    trained_tokens_per_s: float | None
    """The targets of the loss, counted once per epoch, over the seconds of learning."""
    mfu: float | None
    """The model flops utilization of learning: the operations of the model's forward and backward over whole rows,
    divided by the device's peak in the seconds of learning. Sharing prefixes raises it, even above 1."""
    padded_tokens: int | None
    """The tokens of forward passes if rows were padded to the longest of their micro-batch."""
    packed_tokens: int | None
    """The tokens without padding."""
    computed_tokens: int | None
    """The tokens that were computed: prefixes that rows share count once."""
    padding_gain: float | None
    """`padded_tokens / packed_tokens`."""
    sharing_gain: float | None
    """`packed_tokens / computed_tokens`."""
    peak_memory_mb: float
    """The peak memory of the process since its start, in MiB."""
    peak_gpu_memory_mb: float | None
    """The peak memory that torch allocated on its GPU, in MiB; None without one."""

    @classmethod
    def of(cls, times: StepTimes, sampled_tokens: int, work: UpdateWork | None, peak: float | None) -> StepSpeed:
        """Computes the speed of a step; `peak` is the peak operations per second of the learner's device."""
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
            mfu=_rate(work.flops, able) if work and work.flops is not None else None,
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
