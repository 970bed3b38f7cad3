"""Conversations to learn from by imitation: a policy plays, and its replies become token rows with a mask."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.action import Action
from agentgym.envs.policies import policy_for
from agentgym.envs.text_env import TextEnv
from agentgym.rollout.replies import reply_ids
from agentgym.types import Message, ToolCall

__all__ = ["Demonstration", "DemonstrationConfig", "ReplyEncoder", "demonstrate", "stream"]


@dataclass(frozen=True, kw_only=True)
class DemonstrationConfig:
    """Who plays, and how carelessly."""

    policy: str = "oracle"
    """A name of POLICIES: the player to imitate."""
    mistakes: float = 0.0
    """The share of turns at which the random policy moves instead."""
    learn_mistakes: bool = False
    """Whether the random moves are imitated too; else they are played, and seen, but not trained on."""


@dataclass(frozen=True)
class Demonstration:
    """One conversation: `ids` of the whole, and for each id whether it is imitated. Example: `((1, 5, 2), (0, 1, 1))`.

    The masked ids are exactly what a model would have sampled, the end token included.
    """

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    success: bool


def demonstrate(
    env: TextEnv, renderer: Renderer, seed: int, config: DemonstrationConfig, encode: ReplyEncoder | None = None
) -> Demonstration:
    """Plays `env` from `seed`; the mistakes follow from the seed as well."""
    observation, info = env.reset(seed=seed)
    player, stray = policy_for(env, config.policy), policy_for(env, "random")
    player.reset(env, observation, seed)
    stray.reset(env, observation, seed + 1)
    rng = np.random.default_rng([seed, 1])
    system = (Message("system", env.system_prompt),) if env.system_prompt else ()
    ids = renderer.render([*system, *info["messages"]], env.tool_specs)
    mask = [False] * len(ids)
    encode = encode or ReplyEncoder(renderer)
    while True:
        is_mistake = bool(rng.random() < config.mistakes)
        message = (stray if is_mistake else player).act(observation)
        reply = encode(message)
        ids += reply
        mask += [not is_mistake or config.learn_mistakes] * len(reply)
        observation, _, terminated, truncated, info = env.step(Action.from_message(message))
        if terminated or truncated:
            return Demonstration(tuple(ids), tuple(mask), bool(info["metrics"]["success"]))
        answer = renderer.extend(ids, info["messages"])
        ids += answer
        mask += [False] * len(answer)


class _Said:
    """A message as a key: equal when the same words are said, whatever the call ids are."""

    def __init__(self, message: Message) -> None:
        self.message = message
        calls = [(c.name, tuple(c.arguments.items())) for c in message.tool_calls if isinstance(c, ToolCall)]
        self._key = (message.content, message.reasoning, repr(calls))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Said) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class ReplyEncoder:
    """`reply_ids` of a renderer, remembered: players say the same few things again and again."""

    def __init__(self, renderer: Renderer) -> None:
        self._encode = functools.lru_cache(50_000)(lambda said: reply_ids(renderer, said.message))

    def __call__(self, message: Message) -> tuple[int, ...]:
        return self._encode(_Said(message))


def stream(
    envs: Sequence[TextEnv], renderer: Renderer, first_seed: int, config: DemonstrationConfig
) -> Iterator[Demonstration]:
    """Endless demonstrations, the environments in turn, seeds counting up from `first_seed`."""
    seed, encode = first_seed, ReplyEncoder(renderer)
    while True:
        yield demonstrate(envs[seed % len(envs)], renderer, seed, config, encode)
        seed += 1
