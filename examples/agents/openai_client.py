"""An agent with OpenAI's client alone: it asks for a reply, and then for the environment's answer.

pip install openai
agentgym eval --env TextGame-v0 --agent examples/agents/openai_client.py:play
agentgym train --env TextGame-v0 --agent examples/agents/openai_client.py:play
"""

from typing import Any

from openai import OpenAI, omit

from agentgym import AgentEpisode


def play(episode: AgentEpisode) -> None:
    """Plays an episode to its end."""
    client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    tools: Any = [*episode.tools] or omit
    messages: Any = [*episode.messages]
    is_over = False
    while not is_over:
        reply = client.chat.completions.create(model=episode.model, messages=messages, tools=tools)
        answer: Any = client.post(f"{episode.root_url}/step", cast_to=object)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), *answer["messages"]]
        is_over = answer["terminated"] or answer["truncated"]
