"""An agent of the OpenAI Agents SDK, whose tools are those of the environment's MCP server.

pip install openai-agents
agentgym eval --env TextGame-v0 --agent examples/agents/openai_agents_sdk.py:play
"""

from agents import Agent, Model, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp
from openai import AsyncOpenAI

from agentgym import AgentEpisode

set_tracing_disabled(True)  # traces go to OpenAI


async def play(episode: AgentEpisode) -> None:
    """Plays an episode by Responses."""
    await run(episode, OpenAIResponsesModel(episode.model, openai_client(episode)))


async def play_chat(episode: AgentEpisode) -> None:
    """Plays an episode by chat completions."""
    await run(episode, OpenAIChatCompletionsModel(episode.model, openai_client(episode)))


def openai_client(episode: AgentEpisode) -> AsyncOpenAI:
    """Returns a client of the model."""
    return AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)


async def run(episode: AgentEpisode, model: Model) -> None:
    """Has the SDK play."""
    key = {"Authorization": f"Bearer {episode.api_key}"}
    async with MCPServerStreamableHttp({"url": episode.mcp_url, "headers": key}) as server:
        await Runner.run(Agent("player", mcp_servers=[server], model=model), episode.prompt, max_turns=100)
