"""A pure MCP environment behind the real OpenEnv, run by an interpreter that has it: `openenv_echo.py PORT`."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Echo(MCPEnvironment):
    """Two tools, of which one fails on demand; one session at a time; no reward and no end."""

    def __init__(self):
        server = FastMCP("echo")

        @server.tool()
        def echo(message: str) -> str:
            """Returns the message."""
            return message

        @server.tool()
        def measure(message: str) -> dict[str, int]:
            """Returns the length of the message."""
            if not message:
                raise ValueError("there is no message")
            return {"length": len(message)}

        super().__init__(server)
        self._state = State()

    def reset(self, seed=None, episode_id=None, **settings):
        """Starts an episode."""
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(metadata={"message": "Echo is ready."})

    def _step_impl(self, action, timeout_s=None, **settings):
        return Observation(metadata={"error": "only tool calls are actions"})

    @property
    def state(self):
        """The episode's id and its number of steps."""
        return self._state


if __name__ == "__main__":
    app = create_app(Echo, CallToolAction, CallToolObservation, env_name="echo")
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
