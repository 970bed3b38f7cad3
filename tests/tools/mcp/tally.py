"""A text game whose way of walking is an MCP server's tool, which counts the steps."""

from __future__ import annotations

import sys
from pathlib import Path

from agentgym.envs import ToolEnv
from agentgym.envs.games.text_game.env import TextGame
from agentgym.tools.mcp import McpServer, McpTools

COUNTER = Path(__file__).parent / "servers" / "counter.py"
SERVER = McpServer(command=(sys.executable, str(COUNTER)), start_timeout_s=300)


class Tally(TextGame):
    """The embedded model plays it as it plays the game."""

    card = None
    runs_inline = False
    go = None  # type: ignore[assignment]

    def __init__(self, render_mode: str | None = None) -> None:
        ToolEnv.__init__(self, render_mode, tool_sources=[lambda: McpTools(SERVER, names=["go"])])
        self.level, self.shaped = 1, False
