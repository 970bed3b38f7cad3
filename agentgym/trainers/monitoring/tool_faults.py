"""Counts the failures of a step's tools that are not the model's fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from agentgym.rollout.episode.episode_loop import FAULT_TOOL
from agentgym.trajectory import Trajectory

__all__ = ["ToolFaults"]


@dataclass(frozen=True, kw_only=True)
class ToolFaults:
    """The tool calls that ended their episodes as `env_error`, unlike `tool_errors`, which the model reads."""

    tool_faults: int
    """The number of calls whose tool failed without a mistake of the model: a service down, a full disk, a defect."""
    tool_fault_share: float
    """The largest share of such calls among the calls of one tool."""
    faulty_tool: str | None
    """The tool that has this share; None without a fault."""

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> ToolFaults:
        """Counts the calls of each tool that was run, in the answers of all turns."""
        faults, calls = Counter[str](), Counter[str]()
        for trajectory in trajectories:
            name = trajectory.info.get(FAULT_TOOL)
            if isinstance(name, str):
                faults[name] += 1
                calls[name] += 1
            results = (result for turn in trajectory.turns for result in turn.tool_results)
            calls.update(result.name for result in results if result.error in (None, "tool_error", "timeout"))
        shares = {name: count / calls[name] for name, count in faults.items()}
        worst = max(shares, key=lambda name: (shares[name], name), default=None)
        return cls(
            tool_faults=faults.total(), tool_fault_share=0.0 if worst is None else shares[worst], faulty_tool=worst
        )
