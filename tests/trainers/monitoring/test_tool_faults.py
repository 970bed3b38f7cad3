"""The numbers of a step count the tool calls that failed by no mistake of the model."""

from __future__ import annotations

from agentgym.trainers.monitoring.tool_faults import ToolFaults
from agentgym.trajectory import Status, StopReason, Trajectory, Turn
from agentgym.types import Message, Task, ToolResult


def episode(*results: ToolResult, fault: str = "") -> Trajectory:
    turns = tuple(Turn(Message("assistant", ""), 0.0, "", (result,)) for result in results)
    return Trajectory(
        task=Task("Shop-v0", 0),
        group="0",
        member=0,
        rows=(),
        turns=(*turns, Turn(Message("assistant", ""), None)) if fault else turns,
        status=Status.ENV_ERROR if fault else Status.COMPLETED,
        stop_reason=StopReason.ENV_ERROR if fault else StopReason.TERMINATED,
        error=f"tool {fault!r} raised" if fault else None,
        info={"fault_tool": fault} if fault else {},
    )


def test_a_step_without_faults_has_none() -> None:
    calls = [ToolResult("0", "search", "found"), ToolResult("1", "search", "no such page", "tool_error")]
    assert ToolFaults.of([episode(*calls)]) == ToolFaults(tool_faults=0, tool_fault_share=0.0, faulty_tool=None)


def test_the_tool_that_fails_in_the_largest_share_of_its_calls_is_named() -> None:
    search_result, bought = ToolResult("0", "search", "found"), ToolResult("1", "buy", "bought")
    refused = ToolResult("2", "search", "the schema refuses it", "invalid_arguments")
    episodes = [
        *(episode(search_result, search_result, search_result) for _ in range(5)),
        episode(search_result, refused, fault="search"),
        episode(fault="search"),
        episode(bought, fault="buy"),
    ]
    counted = ToolFaults.of(episodes)
    assert counted.tool_faults == 3
    assert (counted.faulty_tool, counted.tool_fault_share) == ("buy", 1 / 2)
    assert ToolFaults.of(episodes[:-1]).tool_fault_share == 2 / 18
