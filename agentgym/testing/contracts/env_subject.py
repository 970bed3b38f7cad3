"""The shared parts of an environment's checks: the subject, the complaints, and recorded play."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import gymnasium

from agentgym.envs.base.action import Action
from agentgym.envs.base.card import EnvCard, card_of
from agentgym.envs.base.policies import Policy, RandomPolicy, policy_reply
from agentgym.envs.base.text_env import StepResult, TextEnv
from agentgym.envs.base.wrapped_env import as_text_env
from agentgym.testing.contracts.tool_watch import RaisedError, watched_tools
from agentgym.types import JSON

__all__ = [
    "Check",
    "Complaint",
    "EnvUnderTest",
    "EpisodeResult",
    "difference",
    "json_default",
    "line",
    "play_episode",
    "texts",
    "transcript",
]

MAX_STEPS = 60
UNLIMITED_STEPS = 100
"""The steps after which an episode without a turn limit is left."""
POLICY_SEED = 1_000_003
"""The offset of a policy's seed: the episode's own seed would give it the numbers that the task was drawn from."""
LONGEST_EPISODE = 2000
"""The senseless replies after which an environment that has not ended has no turn limit."""
Complaint: TypeAlias = tuple[Literal["error", "warning", "not claimed"], str]
"""A check's finding; "not claimed" names what the environment does not promise, which is therefore not checked."""


@dataclasses.dataclass(frozen=True)
class EnvUnderTest:
    """An environment under examination; a call makes one: `EnvUnderTest(Lock, env_id="Lock-v0")().reset(seed=0)`."""

    maker: Callable[..., TextEnv]
    kwargs: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    env_id: str = ""
    """The id or path that the user gave; "" if a class was given."""
    played: dict[tuple[str, str, int], EpisodeResult] = dataclasses.field(default_factory=dict, repr=False)
    """The episodes that checks have played, by keywords, player and seed; its variants share them."""

    def __call__(self) -> TextEnv:
        env: object = self.maker(**self.kwargs)
        return cast(TextEnv, as_text_env(env) if isinstance(env, gymnasium.Wrapper) else env)

    def at(self, **kwargs: JSON) -> EnvUnderTest:
        """Returns the same environment with other keywords."""
        return dataclasses.replace(self, kwargs={**self.kwargs, **kwargs})

    def card(self) -> EnvCard | None:
        """Returns the card, or None."""
        env = self()
        try:
            return card_of(self.env_id, env)
        finally:
            env.close()

    def difficulties(self, card: EnvCard) -> Iterator[EnvUnderTest]:
        """Yields the environment as it is, then in every difficulty of its card."""
        yield self
        if card.difficulty is not None:
            for value in card.difficulty.values:
                yield self.at(**{card.difficulty.keyword: value})

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.kwargs.items())


Check: TypeAlias = Callable[[EnvUnderTest], Iterator[Complaint]]


@dataclasses.dataclass(frozen=True)
class EpisodeResult:
    """The outcome of an episode."""

    reward: float
    """The sum of its rewards."""
    success: float | None
    """The verdict that the environment gave at its end; None if it gave none."""
    ended: bool
    last_turn: str
    """The last reply and its answer."""
    raised: Sequence[RaisedError]
    """What tools raised, also if the model would read it as its own mistake."""

    @property
    def score(self) -> float:
        """The verdict, or the reward if there is none."""
        return self.reward if self.success is None else self.success


def play_episode(
    env: TextEnv, policy: Policy, seed: int, watch: Callable[[str, StepResult], None] | None = None
) -> EpisodeResult:
    """Plays one episode; `watch` gets each reply and its result, and first "" and the result of the reset."""
    observation, info = env.reset(seed=seed)
    if watch is not None:
        watch("", (observation, 0.0, False, False, info))
    policy.reset(env, observation, seed + POLICY_SEED)
    reward, ended, steps, before = 0.0, False, 0, ""
    with watched_tools(env) as raised:
        while not ended and steps < (env.max_turns or UNLIMITED_STEPS):
            action = Action.from_message(policy_reply(policy, observation))
            result, before = env.step(action), observation if steps else ""
            observation, paid, terminated, truncated, info = result
            reward, ended, steps = reward + paid, terminated or truncated, steps + 1
            if watch is not None:
                watch(str(action), result)
    success = info.get("metrics", {}).get("success")
    last_turn = (
        f"the last reply {' '.join(action.split()):.200} was answered {observation!r:.200}" if steps else "no reply"
    )
    last_turn += f", the one before it {before!r:.200}" if before else ""
    last_turn += (
        f"; its verifier printed {output!r:.200}" if (output := getattr(env.unwrapped, "verifier_output", "")) else ""
    )
    return EpisodeResult(reward, None if success is None else float(success), ended, last_turn, raised)


def transcript(
    env: TextEnv,
    seed: int,
    policy_seed: int | None = None,
    *,
    steps: int = MAX_STEPS,
    begun: Callable[[], object] | None = None,
) -> list[str]:
    """Returns a random episode as lines of text; the policy draws from `policy_seed` (default `seed`).

    `begun` is called between the reset and the first step.
    """
    observation, info = env.reset(seed=seed)
    lines = [line(observation, info)]
    policy = RandomPolicy()
    policy.reset(env, observation, seed if policy_seed is None else policy_seed)
    if begun is not None:
        begun()
    for _ in range(steps):
        result = env.step(Action.from_message(policy.act(observation)))
        observation, terminated, truncated = result[0], result[2], result[3]
        lines.append(line(*result))
        if terminated or truncated:
            break
    return lines


def line(*parts: object) -> str:
    """Returns the parts of a step as one line, whatever they hold."""
    return json.dumps(parts, default=lambda value: json_default(value, strict=False), sort_keys=True)


def json_default(value: object, strict: bool = True) -> object:
    """Returns the form in which the run folder writes a value that JSON does not know: dataclasses only."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if strict:
        raise TypeError(f"a {type(value).__name__} is not JSON; use str, int, float, bool, list, dict or a dataclass")
    return type(value).__name__


def difference(first: Sequence[str], other: Sequence[str]) -> str:
    """Returns the place where two transcripts begin to differ."""
    for number, (left, right) in enumerate(zip(first, other, strict=False)):
        if left != right:
            at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), 0)
            begin = max(0, at - 20)
            return f"step {number}: ...{left[begin : at + 40]} / ...{right[begin : at + 40]}"
    return f"{len(first) - 1} steps / {len(other) - 1} steps"


def texts(value: Any) -> Iterator[str]:
    """Yields every text and number inside a value, keys included, as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from texts(getattr(value, part.name))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from texts(part)
    elif isinstance(value, str | int | float):
        yield str(value)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from texts(part)
