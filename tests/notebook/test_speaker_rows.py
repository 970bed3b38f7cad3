"""The conversation of an episode, as a notebook shows it."""

from __future__ import annotations

from agentgym.notebook.speaker_rows import MAX_ROWS, speaker_rows
from agentgym.trajectory import Turn
from agentgym.types import MalformedCall, Message, ToolCall, ToolResult


def test_each_line_has_its_speaker() -> None:
    call = ToolCall("call_0", "go", {"direction": "north"})
    reply = Message("assistant", "", reasoning="hm", tool_calls=(call, MalformedCall("call_1", "<go", "torn")))
    turn = Turn(reply, 1.0, observation="A hall.", tool_results=(ToolResult("call_0", "go", "A hall."),))
    rows = speaker_rows([Message("user", "Go!")], [turn, Turn(Message("assistant", "done"), None, "Bye.")])
    assert rows == [
        ("user", "Go!"),
        ("reasoning", "hm"),
        ("assistant", "go(direction='north')\ncall that cannot be read: <go"),
        ("tool", "A hall."),
        ("reward", "1"),
        ("assistant", "done"),
        ("environment", "Bye."),
    ]


def test_the_middle_of_a_long_conversation_is_left_out() -> None:
    rows = speaker_rows([], [Turn(Message("assistant", str(n)), None) for n in range(500)])
    assert len(rows) == MAX_ROWS + 1 and ("...", "440 more") in rows and rows[-1] == ("assistant", "499")
