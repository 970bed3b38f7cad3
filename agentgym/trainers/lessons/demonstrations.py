"""Conversations to learn from by imitation: a policy plays, and its replies become token rows with a mask."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.base.action import Action
from agentgym.envs.base.policies import ScriptedPolicy, policy_for, policy_reply
from agentgym.envs.base.text_env import TextEnv
from agentgym.errors import ConfigError
from agentgym.rollout.episode.replies import reply_ids
from agentgym.rollout.hosting.env_code import attempt, unwrap_user_outcome
from agentgym.settings.config_class import config_class
from agentgym.trajectory import Row, Source, TokenSpan
from agentgym.types import Message, ToolCall

__all__ = ["Demonstration", "DemonstrationConfig", "Pair", "ReplyEncoder", "demonstrate", "stream"]

T = TypeVar("T")


@config_class
class DemonstrationConfig:
    """The player of the demonstrations, and the share of its mistakes."""

    policy: str = "oracle"
    """A name of POLICIES: the player to imitate."""
    mistakes: float = 0.0
    """The share of turns at which the random policy moves instead."""
    learn_mistakes: bool = False
    """True imitates the random moves too; otherwise they are played and seen, but not trained on."""
    max_turns: int = 200
    """The most replies in a demonstration; the environment's own limit is usually lower."""

    def __post_init__(self) -> None:
        if not 0 <= self.mistakes <= 1:
            raise ConfigError(f"mistakes is a share of the turns, between 0 and 1, got {self.mistakes}")
        if self.mistakes == 1 and not self.learn_mistakes:
            raise ConfigError(
                "with mistakes=1 every turn is a mistake and nothing is learned; lower it, or learn_mistakes"
            )
        if self.max_turns < 1:
            raise ConfigError(f"max_turns is at least 1, got {self.max_turns}")


@dataclass(frozen=True)
class Demonstration:
    """One conversation: `ids` of the whole, and for each id whether it is imitated. Example: `((1, 5, 2), (0, 1, 1))`.

    The masked ids are exactly what a model would have sampled, the end token included.
    """

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    success: bool | None = None
    """True if the episode succeeded; None if unknown, as for a conversation from a file."""
    messages: tuple[Message, ...] = field(default=(), compare=False)
    """The messages of a demonstration; empty for other rows."""

    @property
    def row(self) -> Row:
        """The ids as a training sequence, as if version 0 of the policy had been certain of each masked id.

        The first id has nothing before it, and is never trained.
        """
        spans: list[TokenSpan] = []
        flags = (False, *self.mask[1:])
        for is_reply, members in itertools.groupby(zip(self.ids, flags, strict=True), lambda member: member[1]):
            ids = tuple(token for token, _ in members)
            if is_reply:
                spans.append(TokenSpan(ids, Source.POLICY, (0.0,) * len(ids), (0,) * len(ids)))
            else:
                spans.append(TokenSpan(ids, Source.ENV if spans else Source.PROMPT))
        return Row(tuple(spans))

    def first(self, num_ids: int) -> Demonstration:
        """Returns the first `num_ids` ids, for a model with a shorter context window."""
        return replace(self, ids=self.ids[:num_ids], mask=self.mask[:num_ids])


@dataclass(frozen=True)
class Pair:
    """A better and a worse continuation of the same prompt, as rows whose masks cover the replies."""

    chosen: Demonstration
    rejected: Demonstration

    @property
    def num_tokens(self) -> int:
        """The ids of both rows."""
        return len(self.chosen.ids) + len(self.rejected.ids)


def demonstrate(
    env: TextEnv,
    renderer: Renderer,
    seed: int,
    config: DemonstrationConfig,
    encode: Callable[[Message], tuple[int, ...]] | None = None,
) -> Demonstration:
    """Plays `env` from `seed`, which also determines the mistakes.

    Raises EnvironmentFault if the environment, or one of its policies, raises; ConfigError for one that has no such
    policy, or whose policy replies with something else than a message.
    """
    name = type(env.unwrapped).__name__

    def theirs(call: Callable[[], T], kind: str = "") -> T:
        who = f"the {kind} policy of {name}" if kind else name
        return unwrap_user_outcome(attempt(call), f"{who} failed with seed {seed}", seed)

    observation, info = theirs(lambda: env.reset(seed=seed))
    player, stray = (theirs(functools.partial(policy_for, env, kind), kind) for kind in (config.policy, "random"))
    theirs(functools.partial(player.reset, env, observation, seed), config.policy)
    theirs(functools.partial(stray.reset, env, observation, seed + 1), "random")
    rng = np.random.default_rng([seed, 1])
    messages = list(info["messages"])
    if env.system_prompt and not (messages and messages[0].role == "system"):
        messages.insert(0, Message("system", env.system_prompt))
    ids = renderer.render(messages, env.tool_specs)
    mask = [False] * len(ids)
    encode = encode or ReplyEncoder(renderer)
    for turn in itertools.count(1):
        is_mistake = bool(rng.random() < config.mistakes)
        if is_mistake and isinstance(player, ScriptedPolicy):
            theirs(functools.partial(player.watch, observation), config.policy)
        mover, kind = (stray, "random") if is_mistake else (player, config.policy)
        message = theirs(functools.partial(policy_reply, mover, observation), kind)
        messages.append(message)
        reply = encode(message)
        ids += reply
        mask += [not is_mistake or config.learn_mistakes] * len(reply)
        step = theirs(functools.partial(env.step, Action.from_message(message)))
        observation, _, terminated, truncated, info = step
        messages += info["messages"]
        if terminated or truncated or turn == config.max_turns:
            break
        answer = renderer.extend(ids, info["messages"])
        ids += answer
        mask += [False] * len(answer)
    success = bool(info.get("metrics", {}).get("success", False))
    return Demonstration(tuple(ids), tuple(mask), success, tuple(messages))


class _Said:
    """A message as a key: equal for the same text, whatever the call ids are."""

    def __init__(self, message: Message) -> None:
        self.message = message
        calls = [(c.name, tuple(c.arguments.items())) for c in message.tool_calls if isinstance(c, ToolCall)]
        self._key = (message.content, message.reasoning, repr(calls))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Said) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class ReplyEncoder:
    """`reply_ids` of a renderer with a cache, since players repeat the same few replies."""

    def __init__(self, renderer: Renderer) -> None:
        self._encode = functools.lru_cache(50_000)(lambda key: reply_ids(renderer, key.message))

    def __call__(self, message: Message) -> tuple[int, ...]:
        return self._encode(_Said(message))


def stream(
    envs: Sequence[TextEnv], renderer: Renderer, first_seed: int, config: DemonstrationConfig
) -> Iterator[Demonstration]:
    """Yields demonstrations endlessly, with the environments in turn and seeds counting up from `first_seed`."""
    seed, encode = first_seed, ReplyEncoder(renderer)
    while True:
        yield demonstrate(envs[seed % len(envs)], renderer, seed, config, encode)
        seed += 1
