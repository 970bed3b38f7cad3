"""An environment of agentgym behind OpenEnv's own server, for a package with `openenv.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from agentgym.envs.adapters.openenv_server import Session, describe_served
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.catalog.resolve import resolve_env
from agentgym.errors import ConfigError
from agentgym.tools.calling.worker import run_sync
from agentgym.types import JSON

try:
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import State
except ImportError as error:
    raise ConfigError(f"OpenEnv cannot be imported ({error}): pip install 'openenv>=0.10'") from error

__all__ = ["ServedByOpenEnv", "create_openenv_app"]


class ServedByOpenEnv(Environment):  # type: ignore[misc]  # the library has no types here
    """An environment of agentgym; `observation` is the class of what it answers, with `text` and `metadata`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, make: Callable[[], TextEnv], observation: Callable[..., Any]) -> None:
        super().__init__()
        self._session = Session(make())
        self._observation = observation

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Any:
        """Begins an episode; a seed is a task, and further values are the environment's own options."""
        return self._observe(await self._session.reset({**options, "seed": seed, "episode_id": episode_id}))

    async def step_async(self, action: Any, timeout_s: float | None = None, **rest: Any) -> Any:
        """Plays a reply: a text, calls of tools, or both."""
        return self._observe(await self._session.step(action.model_dump()))

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Any:
        """`reset_async` for callers that are not async."""
        return run_sync(self.reset_async(seed, episode_id, **options))

    def step(self, action: Any, timeout_s: float | None = None, **rest: Any) -> Any:
        """`step_async` for callers that are not async."""
        return run_sync(self.step_async(action, timeout_s, **rest))

    @property
    def state(self) -> Any:
        """The id of the episode, and its number of steps."""
        return State(**self._session.state())

    def close(self) -> None:
        """Closes the environment."""
        run_sync(self._session.close())

    def _observe(self, answer: Mapping[str, Any]) -> Any:
        return self._observation(**answer["observation"], reward=answer["reward"], done=answer["done"])


def create_openenv_app(
    name: str,
    action: type[Any],
    observation: type[Any],
    env_kwargs: Mapping[str, JSON] | None = None,
    *,
    max_sessions: int = 64,
) -> Any:
    """Returns the FastAPI application of OpenEnv for an environment, by its name.

    `/metadata` has, in addition to OpenEnv's fields, the system prompt and the tools.
    """
    make = resolve_env(name, env_kwargs)
    about = describe_served(name, make)
    app = create_app(
        functools.partial(ServedByOpenEnv, make, observation),
        action,
        observation,
        env_name=name,
        max_concurrent_envs=max_sessions,
    )
    app.add_api_route("/metadata", lambda: about, methods=["GET"], tags=["Environment Info"])
    app.router.routes.insert(0, app.router.routes.pop())  # before OpenEnv's own, which leaves our fields out
    return app
