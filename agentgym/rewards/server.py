"""A server that scores the episodes that are posted to it: a reward on a machine, or a GPU, of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from aiohttp import web

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.http_guard import HttpGuard, RequestRejected, listen, parse_json_object
from agentgym.rewards.reward import InvalidReward, RewardFailure
from agentgym.rewards.rewards import Rewards
from agentgym.rollout.episode.long_text import run_if_short
from agentgym.rollout.record.episodes_file import trajectory_from_json
from agentgym.trajectory import Trajectory

__all__ = ["RewardServer"]

MAX_BODY = 256 * 2**20


class RewardServer:
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
        self.url = ""
        """The URL `http://host:port`, once the server listens."""
        self.num_scored, self.num_failed = 0, 0
        self._place = host, port
        self._guard = HttpGuard(host, token=token, allowed_hosts=allowed_hosts)
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard.middleware(_rejection)])
        app.router.add_post("/", self._score)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    async def __aenter__(self) -> RewardServer:
        await self._runner.setup()
        self.url = await listen(self._runner, self._guard, *self._place)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _score(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = await run_if_short(len(raw), parse_json_object, raw)
        if body.get("settings"):
            return _error(400, "this server has the settings of its reward: leave reward.settings out")
        try:
            trajectory = _read(body.get("trajectory"))
        except (KeyError, TypeError, ValueError, InvalidTrajectory) as error:
            return _error(400, f"the trajectory is not one: {type(error).__name__}: {error}")
        try:
            reward = await self.rewards.of(trajectory)
        except (RewardFailure, InvalidReward) as failure:
            self.num_failed += 1
            return _error(422, str(failure))
        except ConfigError as error:
            return _error(501, str(error))
        self.num_scored += 1
        return web.json_response(asdict(reward))

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "scored": self.num_scored, "failed": self.num_failed})


def _read(line: Any) -> Trajectory:
    if not isinstance(line, dict):
        raise TypeError(f"an object was wanted, got {type(line).__name__}")
    return trajectory_from_json(line)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _rejection(refusal: RequestRejected) -> web.StreamResponse:
    return _error(refusal.status, str(refusal))
