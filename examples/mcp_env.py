"""An environment with the tools of an MCP server. The server knows the towns: `_towns_server.py`."""

import sys
from pathlib import Path
from typing import Any

from agentgym.envs import ToolEnv
from agentgym.tools import tool
from agentgym.tools.mcp import McpServer, McpTools

PROGRAM = Path(__file__).with_name("_towns_server.py")
SERVER = McpServer(command=(sys.executable, str(PROGRAM)), stateless=True)  # not stateless: one for each episode
PEOPLE = {"Ash": 410, "Birch": 1290, "Elm": 875, "Oak": 2330, "Yew": 64}


class Towns(ToolEnv):
    """Which of two towns is larger? The server knows."""

    max_turns = 4

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode, tool_sources=[lambda: McpTools(SERVER)])

    def start(self, options: dict[str, Any]) -> str:
        self.towns = [str(town) for town in self.np_random.choice(list(PEOPLE), size=2, replace=False)]
        return f"Look up how many people live in {self.towns[0]} and in {self.towns[1]}. Then answer with the larger."

    @tool
    def answer(self, town: str) -> str:
        """Answers with a town, which ends the episode."""
        right = town == max(self.towns, key=PEOPLE.__getitem__)
        self.end(success=right, reward=float(right))
        return "Right." if right else "Wrong."
