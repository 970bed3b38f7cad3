"""A complete environment with one JSON-schema tool, for `agentgym train --env examples.last_item:LastItem`."""

from __future__ import annotations

from typing import Any

from agentgym.envs import ToolEnv
from agentgym.tools import tool

THINGS = ("crown", "ring", "goblet", "mirror", "harp", "pearl", "compass", "medal", "flute", "mask", "coin", "clock")


class LastItem(ToolEnv):
    """Four times, three things lie there; the last one that is named is worth a point."""

    system_prompt = "Take the last thing of each list."
    max_turns = 4
    runs_inline = True

    def start(self, options: dict[str, Any]) -> str:
        self.points = 0
        return self._show()

    @tool
    def take(self, item: str) -> str:
        """Take one of the things that are here."""
        if item == self.things[-1]:
            self.points += 1
            self.reward = 0.25
        if self.turns == self.max_turns:
            self.end(success=self.points == self.max_turns)
        return self._show()

    def _show(self) -> str:
        self.things = [str(thing) for thing in self.np_random.permutation(THINGS)[:3]]
        return f"Here: {', '.join(self.things)}"
