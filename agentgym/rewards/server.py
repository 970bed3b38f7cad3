"""A server that scores the episodes that are posted to it: a reward on a machine, or a GPU, of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.http_guard import HttpGuard, JsonServer, RequestRejected, parse_json_object
from agentgym.rewards.reward import InvalidReward, RewardFailure
from agentgym.rewards.rewards import Rewards
from agentgym.rollout.episode.long_text import run_if_short
from agentgym.rollout.record.episodes_file import trajectory_from_json
from agentgym.trajectory import Trajectory

__all__ = ["RewardServer"]

MAX_BODY = 256 * 2**20


class RewardServer(JsonServer):
    """Serves `rewards` as `reward.remote` asks for them; an asynchronous context manager, which listens inside.

    | request | answer |
    |---|---|
    | `POST /`, `{"trajectory": ..., "settings": {}}` | the fields of a `Reward` |
    | `GET /health` | how many episodes were scored, and how many could not be |

    An episode that cannot be scored is answered with status 422 and the reason; a reward that cannot be computed for
    any, with 501, which ends the run that asked.
    """

    def __init__(
        self,
        rewards: Rewards,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        allowed_hosts: Collection[str] = (),
    ) -> None:
        """Raises ConfigError for a reward that compares episodes, or looks into their environments."""
        rewards.check_alone()
        self.rewards = rewards
        self.num_scored, self.num_failed = 0, 0
        guard = HttpGuard(host, token=token, allowed_hosts=allowed_hosts)
        endpoints = {("POST", "/"): self._score, ("GET", "/health"): self._health}
        super().__init__(endpoints, guard, host, port, max_body=MAX_BODY)

    async def _score(self, raw: bytes) -> tuple[int, object]:
        body = await run_if_short(len(raw), parse_json_object, raw)
        if body.get("settings"):
            message = "this server has the settings of its reward: leave reward.settings out"
            raise RequestRejected(400, "settings", message)
        try:
            trajectory = _read(body.get("trajectory"))
        except (KeyError, TypeError, ValueError, InvalidTrajectory) as error:
            message = f"the trajectory is not one: {type(error).__name__}: {error}"
            raise RequestRejected(400, "trajectory", message) from error
        try:
            reward = await self.rewards.of(trajectory)
        except (RewardFailure, InvalidReward) as failure:
            self.num_failed += 1
            raise RequestRejected(422, "reward_failed", str(failure)) from failure
        except ConfigError as error:
            raise RequestRejected(501, "reward_unusable", str(error)) from error
        self.num_scored += 1
        return 200, asdict(reward)

    async def _health(self, _: bytes) -> tuple[int, object]:
        return 200, {"status": "ok", "scored": self.num_scored, "failed": self.num_failed}


def _read(line: Any) -> Trajectory:
    if not isinstance(line, dict):
        raise TypeError(f"an object was wanted, got {type(line).__name__}")
    return trajectory_from_json(line)
