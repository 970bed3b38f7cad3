"""A customer of Retail-v0 that a model plays, behind any OpenAI-compatible endpoint.

CUSTOMER_URL=http://127.0.0.1:8000/v1 agentgym eval --env Retail-v0 \
    --env-kwargs level=3 user=examples/model_customer.py:ModelCustomer --policy oracle -n 5

CUSTOMER_MODEL names the model where the endpoint has several; its key is read from OPENAI_API_KEY.
"""

from __future__ import annotations

import asyncio
import os

from agentgym.engines.openai import ChatEndpoint, ChatEndpointConfig
from agentgym.engines.protocol import Sampling
from agentgym.envs.tasks.retail.customer import Brief
from agentgym.types import Message

DONE = "[DONE]"
RULES = f"""\
Never say that you are a model. When every wish is dealt with, or the desk cannot help you any further, say goodbye and
end your message with {DONE}."""


class ModelCustomer:
    """A `SimulatedUser`; an endpoint that does not answer is a fault of the environment, and no loss of the desk's."""

    def __init__(self) -> None:
        self.is_over = False
        self._url = os.environ.get("CUSTOMER_URL", "http://127.0.0.1:8000/v1")
        self._config = ChatEndpointConfig(model=os.environ.get("CUSTOMER_MODEL"))

    def begin(self, brief: Brief) -> str:
        self._messages = [Message("system", f"{brief.instructions()}\n{RULES}")]
        return self.answer("Hello, what can I do for you?")

    def answer(self, text: str) -> str:
        self._messages.append(Message("user", text))
        reply = asyncio.run(self._ask())
        self._messages.append(reply)
        self.is_over = DONE in reply.content
        return reply.content.replace(DONE, "").strip()

    async def _ask(self) -> Message:
        async with ChatEndpoint(self._url, self._config) as endpoint:
            return (await endpoint.complete(self._messages, sampling=Sampling(max_tokens=1024))).message
