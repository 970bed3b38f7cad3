"""An MCP server with one tool, for `mcp_env.py`."""

from mcp.server.mcpserver import MCPServer

PEOPLE = {"Ash": 410, "Birch": 1290, "Elm": 875, "Oak": 2330, "Yew": 64}
server = MCPServer("towns")


@server.tool()
def population(town: str) -> str:
    """How many people live in a town."""
    return f"{town} has {PEOPLE[town]} people." if town in PEOPLE else "There is no such town."


if __name__ == "__main__":
    server.run()
