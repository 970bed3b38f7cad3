"""`WrappedEnv`: a text environment in Gymnasium's wrappers, whose rewards, texts and ends are those of the wrappers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import gymnasium
from gymnasium.spaces import Text as GymnasiumTextSpace
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from agentgym.envs.base.spaces import Text
from agentgym.envs.base.text_env import EpisodeOver, Info, StepResult, TextEnv
from agentgym.errors import EnvironmentFault
from agentgym.types import Message

__all__ = ["WrappedEnv", "as_text_env"]

OWN_CHECKS = (OrderEnforcing, PassiveEnvChecker, TimeLimit)
"""The wrappers that `gymnasium.make` adds: a TextEnv checks its own use, and counts its own turns."""


class WrappedEnv(gymnasium.Wrapper[str, str, str, str]):
    """A TextEnv in wrappers, which has the attributes of the outermost layer that defines them: tools, card, oracle.

    An observation that a wrapper changed replaces the inner one in `info["messages"]` and `info["history"]`, unless the
    wrapper changed these too. An episode that a wrapper truncates before the environment gave a verdict is no success.
    The async pair runs the wrappers on the thread of the environment's sync code.
    """

    runs_inline: bool = False  # the environment's promise does not include its wrappers

    def __init__(self, env: gymnasium.Env[Any, Any], max_turns: int | None) -> None:
        super().__init__(env)
        self._inner, self._is_over = cast(TextEnv, env.unwrapped), False
        self.max_turns = max_turns
        card = env.get_wrapper_attr("card")
        self.card = card and replace(card, reward_range=(-math.inf, math.inf))  # a wrapper may pay anything
        self._statistics = env.get_wrapper_attr("_stats_key") if env.has_wrapper_attr("_stats_key") else None
        """The key of RecordEpisodeStatistics in an info; its seconds are left out, as they differ each time."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "fork":  # a fork would have no wrappers
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.env.get_wrapper_attr(name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Begins an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._is_over = False
        return observation, self._shown_info(observation, info)

    def step(self, action: str) -> StepResult:
        """Plays one reply."""
        if self._is_over:
            raise EpisodeOver(f"{self}.step was called after the episode ended; call reset first")
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._is_over = bool(terminated or truncated)
        info = self._shown_info(observation, info)
        if truncated and not terminated and self._inner._open and isinstance(info.get("metrics"), Mapping):
            info["metrics"] = {"success": 0.0, **info["metrics"]}
        if self._statistics in info:
            info[self._statistics] = {key: value for key, value in info[self._statistics].items() if key != "t"}
        return observation, cast(float, reward), bool(terminated), bool(truncated), info

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """`reset` for async callers."""
        return await self._inner.own_thread.run(lambda: self.reset(seed=seed, options=options))

    async def astep(self, action: str) -> StepResult:
        """`step` for async callers."""
        return await self._inner.own_thread.run(lambda: self.step(action))

    async def aclose(self) -> None:
        """`close` for async callers; gives up waiting after `close_timeout_s`."""
        await self._inner.own_thread.run_within(self.close, self._inner.close_timeout_s)

    def _shown_info(self, observation: object, info: Mapping[str, Any]) -> Info:
        """Returns the info with the messages that show the observation of the outermost wrapper."""
        if not isinstance(observation, str):
            raise EnvironmentFault(f"{self} gave an observation of type {type(observation).__name__}; it must be a str")
        inner, answer = self._inner._last_observation, self._inner._last_messages
        visible = {"messages": (Message("user", observation),), **info}
        if observation != inner and visible["messages"] == answer:
            visible["messages"] = _with_text(answer, inner, observation)
            if (history := info.get("history")) and tuple(history[-len(answer) :]) == tuple(answer):
                visible["history"] = (*history[: -len(answer)], *visible["messages"])
        return visible


def as_text_env(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Returns a text environment in wrappers as a WrappedEnv, and any other environment as it is.

    If the wrappers are only those of OWN_CHECKS, it is the TextEnv inside, with the smallest limit of turns.
    """
    inner, layer, is_bare = env.unwrapped, env, True
    if not isinstance(inner, TextEnv) or isinstance(env, TextEnv | WrappedEnv):
        return env
    limits = [inner.max_turns]
    while isinstance(layer, gymnasium.Wrapper):
        limits.append(getattr(layer, "_max_episode_steps", None))
        is_bare, layer = is_bare and type(layer) in OWN_CHECKS, layer.env
    limit = min(filter(None, limits), default=None)
    if is_bare:
        inner.max_turns = limit
        return inner
    spaces = (env.action_space, env.observation_space)
    return WrappedEnv(env, limit) if all(isinstance(space, Text | GymnasiumTextSpace) for space in spaces) else env


def _with_text(messages: Sequence[Message], old: str, new: str) -> tuple[Message, ...]:
    """Returns the messages of an observation with the text `new` in place of `old`.

    Several messages that make up the old text get as many lines of the new one as they had, and the last one the rest.
    """
    if "\n".join(message.content for message in messages) != old:
        return tuple(replace(message, content=message.content.replace(old or "\0", new)) for message in messages)
    lines = iter(new.split("\n"))
    sizes = [*(message.content.count("\n") + 1 for message in messages[:-1]), None]
    return tuple(
        replace(each, content="\n".join(islice(lines, size))) for each, size in zip(messages, sizes, strict=True)
    )
