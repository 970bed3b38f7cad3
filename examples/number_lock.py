"""A complete custom environment with one tool. Check it with `agentgym env check examples.number_lock:NumberLock`."""

from __future__ import annotations

from typing import Any

from agentgym.envs import ToolEnv
from agentgym.tools import tool


class NumberLock(ToolEnv):
    """A dial hides a digit; each turn of it says whether the digit is higher or lower."""

    system_prompt = "You open a lock by turning its dial. Use the tool `turn`."
    max_turns = 8
    runs_inline = True

    def start(self, options: dict[str, Any]) -> str:
        self.code = int(self.np_random.integers(0, 100))
        return f"The lock number {int(self.np_random.integers(10**6))} opens at one number from 0 to 99."

    @tool
    def turn(self, number: int) -> str:
        """Turns the dial.

        Args:
            number: where to turn it, from 0 to 99
        """
        if number == self.code:
            self.end(success=True, reward=1.0)
            return "It opens."
        return "Higher." if number < self.code else "Lower."
