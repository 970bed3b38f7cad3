"""The numbers of a step by which its health is judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from agentgym.types import JSON

__all__ = ["StepHealth"]


@dataclass(frozen=True, kw_only=True)
class StepHealth:
    """The numbers of a line of `metrics.jsonl` by which a step is judged; None if the step did not measure it."""

    episodes: int = 0
    replies_cut: int = 0
    replies_cut_by_window: int = 0
    longest_reply: int = 0
    groups: int = 0
    dead_groups: int = 0
    success: float = 0.0
    tool_calls: int = 0
    lost_calls: int = 0
    """The number of calls that reached no tool."""
    tool_fault_share: float = 0.0
    faulty_tool: str = ""
    tool_calls_per_turn: float | None = None
    repeated_ngrams: float | None = None
    repeated_replies: float | None = None
    entropy: float | None = None
    """The entropy in nats per token: of the update, or of the sampled tokens without an update."""
    clip_fraction: float | None = None
    rejects_all: bool = False
    """True if an off-policy correction rejected all tokens, so that no optimizer step was taken."""
    grad_norm: float | None = None
    kl: float | None = None
    """The KL divergence from the reference model, in nats per token."""
    merge_lost: float | None = None
    """The share of what adapters add that the rounded weights lack."""

    @property
    def is_dead(self) -> bool:
        """True if nothing could be learned: no group has an advantage, or a correction rejected all tokens."""
        return self.rejects_all or 0 < self.groups == self.dead_groups

    @classmethod
    def of(cls, line: Mapping[str, JSON]) -> StepHealth:
        """Reads the numbers of a line by their flat names."""
        failed = ("malformed_calls", "truncated_calls", "unknown_tools", "invalid_arguments")
        entropy = _number(line, "entropy")
        return cls(
            episodes=int(_number(line, "episodes") or 0),
            replies_cut=int(_number(line, "replies_cut") or 0),
            replies_cut_by_window=int(_number(line, "replies_cut_by_window") or 0),
            longest_reply=int(_number(line, "longest_reply") or 0),
            groups=int(_number(line, "groups") or 0),
            dead_groups=int(_number(line, "dead_groups") or 0),
            success=_number(line, "success") or 0.0,
            tool_calls=int(_number(line, "tool_calls") or 0),
            lost_calls=int(sum(_number(line, name) or 0 for name in failed)),
            tool_fault_share=_number(line, "tool_fault_share") or 0.0,
            faulty_tool=str(line.get("faulty_tool") or ""),
            tool_calls_per_turn=_number(line, "tool_calls_per_turn"),
            repeated_ngrams=_number(line, "repeated_ngrams"),
            repeated_replies=_number(line, "repeated_replies"),
            entropy=_number(line, "sampled_entropy") if entropy is None else entropy,
            clip_fraction=_number(line, "clip_fraction"),
            rejects_all=_number(line, "optimizer_steps") == 0 and _number(line, "corrected_away") == 1,
            grad_norm=_number(line, "grad_norm"),
            kl=_number(line, "kl"),
            merge_lost=_number(line, "merge_lost"),
        )


def _number(line: Mapping[str, JSON], name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
