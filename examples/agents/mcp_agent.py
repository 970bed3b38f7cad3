"""An agent that knows MCP and nothing of agentgym: each call of the model goes to the environment's MCP server.

pip install openai 'mcp>=2'
agentgym eval --env TextGame-v0 --agent examples/agents/mcp_agent.py:play
"""

import json
from typing import Any

from mcp import Client
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
from openai import AsyncOpenAI

from agentgym import AgentEpisode


async def play(episode: AgentEpisode) -> None:
    """Plays until a reply has no call."""
    model = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
    http = create_mcp_http_client({"Authorization": f"Bearer {episode.api_key}"})
    async with http, Client(streamable_http_client(episode.mcp_url, http_client=http)) as server:
        tools: Any = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema}}
            for tool in (await server.list_tools()).tools
        ]
        messages: list[Any] = [{"role": "user", "content": episode.prompt}]
        while True:
            completion = await model.chat.completions.create(model=episode.model, messages=messages, tools=tools)
            reply = completion.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            for call in reply.tool_calls or ():
                content = await answer(server, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if not reply.tool_calls:
                return


async def answer(server: Client, name: str, arguments: str) -> str:
    """Returns what the environment answers to a call, or why it cannot be made."""
    try:
        result = await server.call_tool(name, json.loads(arguments))
    except ValueError as error:
        return f"unreadable arguments: {error}"
    return "\n".join(getattr(part, "text", "") for part in result.content)
