"""Few calls lead from the rollout's loop to an author's tool: a profile and a traceback stay short."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs import ToolEnv
from agentgym.rollout import Episode, RolloutLoop
from agentgym.tools import tool
from agentgym.types import Task

MAX_FRAMES = 7
"""The frames from the conversation (`RolloutLoop._converse`) to the tool, both counted."""
REPLY = '<tool_call>\n{"name": "turn", "arguments": {"digit": 7}}\n</tool_call><|im_end|>'


class Lock(ToolEnv):
    """Notes the functions that a call of its tool goes through."""

    runs_inline = True
    max_turns = 1

    def start(self, options: dict[str, Any]) -> str:
        self.frames: list[str] = []
        return "A lock."

    @tool
    def turn(self, digit: int) -> str:
        """Turns the dial."""
        self.frames = [frame.name for frame in traceback.extract_stack()]
        return f"It shows {digit}."


def test_a_tool_is_called_within_seven_frames(renderer: Renderer, raw: Callable[[str], list[int]]) -> None:
    lock, reply = Lock(), raw(REPLY)
    loop = RolloutLoop(ScriptedEngine(lambda *_: reply), renderer)
    trajectory = asyncio.run(loop.run(lock, Episode(Task("Lock-v0", 5))))
    assert trajectory.turns[0].observation == "It shows 7."
    frames = lock.frames[lock.frames.index("_converse") :]
    assert frames[-1] == "turn"
    assert len(frames) <= MAX_FRAMES, " ".join(frames)
