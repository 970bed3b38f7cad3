"""Several rewards of one episode: each is a component, and their weighted sum is the reward."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentgym.errors import ConfigError
from agentgym.rewards.reward import InvalidReward, Reward, RewardFailure, RewardSource, read_optional_reward
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.trajectory import Trajectory
from agentgym.types import JSON

__all__ = ["WeightedPart", "WeightedRewards", "read_parts"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightedPart:
    """One of several rewards: `WeightedPart("gsm8k", 0.5)`."""

    function: str
    weight: float = 1.0

    @property
    def name(self) -> str:
        """The component's name: that of the function, without its file or module."""
        return self.function.rpartition(":")[2]


def read_parts(texts: Sequence[str]) -> tuple[WeightedPart, ...]:
    """Reads `("a.py:f=0.5", "gsm8k")`; raises ConfigError for a weight that is not a number and for a repeated name."""
    parts = []
    for text in texts:
        function, equals, weight = text.rpartition("=")
        is_weighted = equals and not {":", "/"} & {*weight}  # a "=" before one of these belongs to a folder's name
        try:
            parts.append(WeightedPart(function, float(weight)) if is_weighted else WeightedPart(text))
        except ValueError:
            raise ConfigError(f"a reward with its weight is NAME=NUMBER, such as gsm8k=0.5, got {text!r}") from None
        if not math.isfinite(parts[-1].weight) or not parts[-1].function:
            raise ConfigError(f"a reward with its weight is NAME=NUMBER, such as gsm8k=0.5, got {text!r}")
    names = [part.name for part in parts]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two rewards are called {repeated[0]!r}: their components need different names")
    return tuple(parts)


class WeightedRewards:
    """Scores by several sources; if one of them fails to score an episode, the episode fails.

    A source that returns None for an episode does not apply to it, as in TRL: it is in neither sum nor components, and
    its name is logged once. An episode to which no source applies fails.
    """

    def __init__(self, parts: Mapping[WeightedPart, RewardSource]) -> None:
        self._parts = parts
        self.together = any(source.together for source in parts.values())
        self.takes_environment = any(source.takes_environment for source in parts.values())
        if self.together and self.takes_environment:
            of_step = next(part.function for part, source in parts.items() if source.together)
            of_env = next(part.function for part, source in parts.items() if source.takes_environment)
            raise ConfigError(
                f"reward {of_env!r} takes the environment, which is closed when {of_step!r} scores a step's episodes:"
                " leave one of them out"
            )
        self.num_at_once = 1 if self.together else sum(source.num_at_once for source in parts.values())
        self._logged_names: set[str] = set()
        self._semaphores = {part: asyncio.Semaphore(source.num_at_once) for part, source in parts.items()}

    async def score(self, trajectories: Sequence[Trajectory], env: HostedEnv | None = None) -> Sequence[object]:
        scorings = [asyncio.ensure_future(self._score_by(part, trajectories, env)) for part in self._parts]
        try:
            values_by_part = await asyncio.gather(*scorings)
        finally:
            for scoring in scorings:
                scoring.cancel()
            await asyncio.gather(*scorings, return_exceptions=True)
        for part, values in zip(self._parts, values_by_part, strict=True):
            if part.name not in self._logged_names and any(value is None for value in values):
                self._logged_names.add(part.name)
                logger.warning("reward %s returned None for an episode, to which it does not apply", part.name)
        return [
            _sum(dict(zip(self._parts, values, strict=True)), len(trajectory.turns))
            for trajectory, values in zip(trajectories, zip(*values_by_part, strict=True), strict=True)
        ]

    async def _score_by(
        self, part: WeightedPart, trajectories: Sequence[Trajectory], env: HostedEnv | None
    ) -> Sequence[object]:
        source = self._parts[part]

        async def score(batch: Sequence[Trajectory]) -> Sequence[object]:
            async with self._semaphores[part]:
                try:
                    return await source.score(batch, env)
                except RewardFailure as failure:
                    return [failure] * len(batch)

        if source.together:
            return await score(trajectories)
        return [values[0] for values in await asyncio.gather(*(score([episode]) for episode in trajectories))]

    async def close(self) -> None:
        for source in self._parts.values():
            await source.close()


def _sum(values: Mapping[WeightedPart, object], num_turns: int) -> Reward | RewardFailure:
    """Returns the weighted sum of an episode's rewards, turn by turn; `success` is that of all rewards that set it."""
    scores: dict[WeightedPart, Reward | None] = {}
    for part, value in values.items():
        try:
            scores[part] = read_optional_reward(value)
        except (RewardFailure, InvalidReward) as error:
            return RewardFailure(f"{part.name}: {error}", getattr(error, "traceback", ""))
    rewards = {part: reward for part, reward in scores.items() if reward is not None}
    if not rewards:
        return RewardFailure(f"none of {', '.join(part.name for part in scores)} applies to it: each returned None")
    turns = [0.0] * num_turns
    for part, reward in rewards.items():
        by_turn = reward.turns if reward.turns is not None else (*(0.0,) * (num_turns - 1), reward.value)
        if len(by_turn) != num_turns:
            return RewardFailure(
                f"{part.name}: a reward has a number for each of the {num_turns} turns, got {len(by_turn)}"
            )
        turns = [total + part.weight * number for total, number in zip(turns, by_turn, strict=True)]
    verdicts = [reward.success for reward in rewards.values() if reward.success is not None]
    notes: dict[str, JSON] = {
        part.name: {**reward.components, **reward.info}
        for part, reward in rewards.items()
        if reward.components or reward.info
    }
    try:
        return Reward(
            math.fsum(turns),
            {part.name: None if reward is None else reward.value for part, reward in scores.items()},
            turns=tuple(turns),
            success=all(verdicts) if verdicts else None,
            info={name: note for name, note in notes.items() if note},
        )
    except (InvalidReward, OverflowError) as error:  # a sum beyond the largest reward
        return RewardFailure.of(error)
