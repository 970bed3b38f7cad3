"""Environments for exports."""

from __future__ import annotations

from typing import Any

from agentgym.envs import TextEnv, ToolEnv
from agentgym.tools import tool
from agentgym.types import Message


class Rooms(ToolEnv):
    """Has a tool that fails, one that tells another story, and one that wins."""

    system_prompt = "Win."
    max_turns = 4
    closed = 0

    def start(self, options: dict[str, Any]) -> str:
        """Begins."""
        if options.get("broken"):
            raise OSError("the door is jammed")
        return f"Room {int(self.np_random.integers(100))}."

    def release(self) -> None:
        """Counts."""
        Rooms.closed += 1

    @tool
    def knock(self) -> str:
        """Knocks."""
        raise OSError("the door is jammed")

    @tool
    def dream(self) -> str:
        """Dreams."""
        self.retell((Message("user", "You wake up."),))
        return "You dream."

    @tool
    def leave(self, door: int) -> str:
        """Leaves by a door."""
        self.end(success=door == 1, reward=0.5)
        return "You are out."


class Heard(TextEnv):
    """Pays a quarter for each of two replies, whatever they are."""

    runs_inline = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begins."""
        return f"Say {seed}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Listens."""
        return "Heard.", 0.25, self.turns == 2, False, {"metrics": {"success": 1.0}}
