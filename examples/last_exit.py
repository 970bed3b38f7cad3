"""A complete environment with one tool, for `agentgym train --env examples.last_exit:LastExit`."""

from __future__ import annotations

from typing import Any

from agentgym.envs import ToolEnv
from agentgym.tools import tool

DIRECTIONS = ("north", "east", "south", "west")


class LastExit(ToolEnv):
    """Two rooms with three exits each; the last exit that is named is the way."""

    system_prompt = "Leave each room by its last exit."
    max_turns = 2
    runs_inline = True

    def start(self, options: dict[str, Any]) -> str:
        self.points = 0
        return self._room()

    @tool
    def go(self, direction: str) -> str:
        """Walk through an exit."""
        if direction == self.exits[-1]:
            self.points += 1
            self.reward = 1 / self.max_turns
        if self.turns == self.max_turns:
            self.end(success=self.points == self.max_turns)
        return self._room()

    def _room(self) -> str:
        self.exits = [str(exit) for exit in self.np_random.permutation(DIRECTIONS)[:3]]
        return f"Room: hall\nExits: {', '.join(self.exits)}"
