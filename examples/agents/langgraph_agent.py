"""An agent of LangGraph, whose tools are those of the environment's MCP server.

pip install langgraph langchain-openai langchain-mcp-adapters
agentgym eval --env TextGame-v0 --agent examples/agents/langgraph_agent.py:play
"""

from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from agentgym import AgentEpisode


async def play(episode: AgentEpisode) -> None:
    """Plays an episode to its end."""
    model = ChatOpenAI(model=episode.model, base_url=episode.base_url, api_key=episode.api_key)
    key = {"Authorization": f"Bearer {episode.api_key}"}
    server = {"url": episode.mcp_url, "transport": "streamable_http", "headers": key}
    tools = await MultiServerMCPClient({"environment": server}).get_tools()
    graph = create_react_agent(model, tools)
    await graph.ainvoke({"messages": [("user", episode.prompt)]}, {"recursion_limit": 200})
