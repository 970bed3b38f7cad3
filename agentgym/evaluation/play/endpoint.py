"""An evaluation against the address of a chat endpoint: a check before it begins, and its usage."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentgym.engines.openai.endpoint import ChatEndpoint, ChatEndpointConfig
from agentgym.rollout.episode.chat_loop import ChatLoop
from agentgym.rollout.limits import Limits, SamplingConfig
from agentgym.trajectory import Trajectory
from agentgym.types import JSON

__all__ = ["EndpointUse", "Quantiles", "endpoint_loop", "endpoint_use", "found_model"]

DEADLINE_S = 86_400.0
"""The deadline of an episode, long because of rate limits; its requests have timeouts of their own."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The median and the 95th percentile of seconds, by nearest rank: `Quantiles(0.8, 2.4)`."""

    p50: float
    p95: float

    @staticmethod
    def of(values: Sequence[float]) -> Quantiles | None:
        """Returns the quantiles of `values`; None if there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        ranks = [ordered[math.ceil(share * len(ordered)) - 1] for share in (0.50, 0.95)]
        return Quantiles(*ranks)

    def to_json(self) -> dict[str, JSON]:
        """Returns both by name."""
        return {"p50": self.p50, "p95": self.p95}


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointUse:
    """The usage of the endpoint by an evaluation's episodes, failed ones included.

    Tokens, cost and times are those of answered requests; failed and refused ones count only as retries.
    """

    num_requests: int
    num_retries: int
    """The number of requests without a reply, which were sent again unless their episode failed."""
    failures: Mapping[str, int]
    """The number of requests without a reply by cause, the commonest first."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: float | None
    """The cost in the currency of the prices; None if no price is set."""
    latency_s: Quantiles | None
    first_token_s: Quantiles | None
    """The seconds to the first token; None if nothing was streamed."""
    num_without_ids: int
    """The number of episodes that hold no token ids."""

    def to_json(self) -> dict[str, JSON]:
        """Returns the usage as a JSON object."""
        return {
            "requests": self.num_requests,
            "retries": self.num_retries,
            "retries_by_cause": dict(self.failures),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "cost": self.cost,
            "latency_s": None if self.latency_s is None else self.latency_s.to_json(),
            "first_token_s": None if self.first_token_s is None else self.first_token_s.to_json(),
            "episodes_without_ids": self.num_without_ids,
        }


def endpoint_use(trajectories: Sequence[Trajectory]) -> EndpointUse | None:
    """Returns the trajectories' usage of an endpoint, by their records; None if none was played through one."""
    played = [trajectory for trajectory in trajectories if isinstance(trajectory.info.get("chat_endpoint"), Mapping)]
    if not played:
        return None

    def total(name: str) -> int:
        return int(sum(trajectory.metrics.get(name, 0) for trajectory in played))

    def seconds(name: str) -> Quantiles | None:
        return Quantiles.of([value for info in infos for value in info[name]])

    infos: list[Any] = [trajectory.info["chat_endpoint"] for trajectory in played]
    failures = sum((Counter(info.get("failures", {})) for info in infos), Counter[str]())
    costs = [trajectory.metrics["cost"] for trajectory in played if "cost" in trajectory.metrics]
    return EndpointUse(
        num_requests=total("num_requests"),
        num_retries=total("num_retries"),
        failures=dict(failures.most_common()),
        prompt_tokens=total("prompt_tokens"),
        cached_tokens=total("cached_tokens"),
        completion_tokens=total("completion_tokens"),
        cost=math.fsum(costs) if costs else None,
        latency_s=seconds("latency_s"),
        first_token_s=seconds("first_token_s"),
        num_without_ids=sum(not trajectory.has_ids for trajectory in played),
    )


def found_model(url: str, config: ChatEndpointConfig) -> ChatEndpointConfig:
    """Returns the settings with the model's name; raises like `ChatEndpoint.open` if the endpoint cannot be used."""

    async def find() -> str | None:
        async with ChatEndpoint(url, config) as endpoint:
            await endpoint.open()
            return endpoint.model

    return replace(config, model=asyncio.run(find()))


async def endpoint_loop(url: str, config: ChatEndpointConfig, limits: Limits, sampling: SamplingConfig) -> ChatLoop:
    """Returns the loop that plays through the endpoint; it belongs to the running event loop."""
    endpoint = ChatEndpoint(url, config)
    try:
        await endpoint.open()
    except BaseException:
        await endpoint.close()
        raise
    return ChatLoop(endpoint, replace(limits, deadline_s=DEADLINE_S), sampling)
