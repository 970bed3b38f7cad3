"""Rewards from the user's own server: an episode is sent as JSON, and its reward comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from agentgym.engines.openai.backoff import MAX_RETRY_AFTER_S, back_off_s
from agentgym.engines.openai.config import RequestConfig
from agentgym.engines.openai.errors import is_transient
from agentgym.engines.openai.rate_limit import RateLimit
from agentgym.engines.servers.http import HttpClient, HttpRefusal, HttpUnreachable, check_addresses, connection_slots
from agentgym.errors import ConfigError
from agentgym.rewards.reward import InvalidReward, RewardFailure
from agentgym.rollout.episode.long_text import run_if_short
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.record.episodes_file import episode_text
from agentgym.rollout.record.json_pieces import encode_json
from agentgym.settings.config_class import config_class
from agentgym.trajectory import Trajectory
from agentgym.url_credentials import read_key

__all__ = ["RemoteConfig", "RemoteReward"]

CHARACTERS_PER_TOKEN = 4
MISTAKES = (401, 403, 404, 405, 501)
"""The HTTP statuses that the next episode would get as well."""


@config_class
class RemoteConfig(RequestConfig):
    """The address of a server that computes rewards, and the limits of its use."""

    url: str = ""
    """The full address to which episodes are posted; empty for no server."""

    def __post_init__(self) -> None:
        RequestConfig.__post_init__(self)
        if self.url:
            check_addresses([self.url], "a reward server")


class RemoteReward:
    """Posts `{"trajectory": ..., "settings": ...}` and reads a number or an object with the fields of a Reward.

    The trajectory is the JSON object that `episodes.jsonl` contains for it.
    """

    together = False
    takes_environment = False

    def __init__(
        self,
        config: RemoteConfig,
        settings: Mapping[str, object],
        num_at_once: int,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.settings = settings
        self.num_at_once = num_at_once
        key = read_key(config.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = HttpClient(config.url, headers=headers, timeout_s=config.timeout_s, use_proxy=True)
        self._sleep = sleep
        self._limit = RateLimit(config.requests_per_minute, config.tokens_per_minute, sleep=sleep, clock=clock)

    async def score(self, trajectories: Sequence[Trajectory], env: HostedEnv | None = None) -> Sequence[object]:
        """Requests the reward of one episode until it is answered or the retries are used up."""
        trajectory = trajectories[0]
        episode_json = await run_if_short(trajectory.num_tokens, episode_text, trajectory)
        payload = f'{{"trajectory":{episode_json},"settings":{encode_json(dict(self.settings))}}}'.encode()
        num_retries = 0
        while True:
            await self._limit.acquire(_num_tokens(trajectory))
            try:
                async with connection_slots():
                    answer = await self._http.post(self.config.url, payload)
                if answer is None:  # an empty answer, which is not the None of a function
                    raise RewardFailure.of(InvalidReward("the reward server answered nothing"))
                return [answer]
            except (HttpRefusal, HttpUnreachable) as failure:
                await self._back_off(failure, f"{trajectory.group}-{trajectory.member}", num_retries)
            num_retries += 1

    async def _back_off(self, failure: HttpRefusal | HttpUnreachable, seed: str, num_retries: int) -> None:
        """Waits before the next request; raises if there is none."""
        words, after_s = str(failure), None
        if isinstance(failure, HttpRefusal):
            if failure.status in MISTAKES:
                raise ConfigError(f"the reward server refuses all requests: {words}; mend reward.remote") from None
            after_s = failure.retry_after_s
            if not is_transient(failure):
                raise RewardFailure(words) from None
        if after_s is not None and after_s > MAX_RETRY_AFTER_S:
            raise RewardFailure(f"{words} (it asks to wait for {after_s:g} s)") from None
        if num_retries >= self.config.max_retries:
            raise RewardFailure(f"{words} (after {num_retries + 1} requests)") from None
        if after_s:
            self._limit.hold(after_s)
        await self._sleep(back_off_s(f"{seed}/{num_retries}", num_retries, after_s))

    async def close(self) -> None:
        await self._http.close()


def _num_tokens(trajectory: Trajectory) -> int:
    """Returns the number of its ids, or without ids an estimate from its text."""
    num_characters = sum(len(turn.message.content) + len(turn.observation) for turn in trajectory.turns)
    return trajectory.num_tokens or num_characters // CHARACTERS_PER_TOKEN
