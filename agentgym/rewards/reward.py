"""The reward of an episode, and the trajectory with a reward or with a failed one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from agentgym.errors import CODE_ERRORS, AgentGymError, ConfigError, is_interrupt
from agentgym.rollout.hosting.tracebacks import user_traceback
from agentgym.trajectory import MAX_REWARD, Status, StopReason, Trajectory, is_reward
from agentgym.types import JSON

if TYPE_CHECKING:
    from agentgym.rollout.hosting.hosted_env import HostedEnv

__all__ = [
    "InvalidReward",
    "Reward",
    "RewardFailure",
    "RewardSource",
    "UnusableReward",
    "apply_failure",
    "apply_reward",
    "components_of",
    "read_optional_reward",
    "read_reward",
    "reward_of_score",
    "with_environment_reward",
]

COMPONENT = "reward/"
"""The prefix of the components' metrics."""
ENVIRONMENT = "environment_reward"
"""The entry of an episode's info that contains the environment's reward."""
NOTE = "reward"
"""The entry of an episode's info that contains `Reward.info`."""
NOT_APPLICABLE = "not_applicable"
"""The entry of `Reward.info` with the names of the components that do not apply to the episode."""
VERDICT = "acc"
"""The name under which functions of verl report whether the answer is right."""
FIELDS = ("value", "components", "turns", "success", "info")
MAX_LINE = 500


class InvalidReward(AgentGymError, ValueError):
    """A reward function returned a value that is not a valid reward."""


class UnusableReward(ConfigError):
    """No episode can get a reward: a setting or a library is missing. Raised by a function, it ends the run."""


class RewardFailure(AgentGymError, RuntimeError):
    """An episode could not be scored: the error's line, and its traceback if there is one."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback

    def __reduce__(self) -> tuple[object, ...]:
        return (RewardFailure, (str(self), self.traceback))

    @classmethod
    def of(cls, error: BaseException) -> RewardFailure:
        """Returns the failure for an exception of a reward function."""
        words = " ".join(str(error).split())
        line = f"{type(error).__name__}: {words}" if words else type(error).__name__
        return cls(line[:MAX_LINE], user_traceback(error))


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of an episode with its components: `Reward(0.7, {"answer": 1.0, "length": -0.3}, success=True)`.

    Raises InvalidReward for a value that is not a finite number, and for information that JSON cannot hold.
    """

    value: float
    """The episode's return, which replaces the environment's."""
    components: Mapping[str, float | None] = field(default_factory=dict)
    """The components by name, kept as the metrics `reward/NAME`; they need not sum to the value. One that is None does
    not apply to the episode: it is left out, and named in `info["not_applicable"]`."""
    turns: tuple[float, ...] | None = None
    """One number for each turn, with the value as their sum; None puts all of it on the last turn."""
    success: bool | None = None
    """True if the task is solved, kept as the metric `success`; None keeps the environment's value."""
    info: Mapping[str, JSON] = field(default_factory=dict)
    """Information for a reader of the record, such as a judge's words; kept as the trajectory's `info["reward"]`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _number(self.value, "a reward"))
        missing: list[JSON] = [str(name) for name, value in self.components.items() if value is None]
        numbers_of = {
            str(name): _number(value, f"the component {name!r}")
            for name, value in self.components.items()
            if value is not None
        }
        object.__setattr__(self, "components", numbers_of)
        if self.turns is not None:
            object.__setattr__(self, "turns", tuple(_number(turn, "a turn's reward") for turn in self.turns))
            total = math.fsum(self.turns)
            if not math.isclose(total, self.value, rel_tol=1e-6, abs_tol=1e-6):
                raise InvalidReward(f"the rewards of the turns sum to the value: {total:g} is not {self.value:g}")
        if self.success is not None:
            if not is_reward(self.success):
                raise InvalidReward(f"success is true or false, got {self.success!r:.80}")
            object.__setattr__(self, "success", bool(self.success))
        if self.info or missing:
            object.__setattr__(self, "info", _as_json({**self.info, **({NOT_APPLICABLE: missing} if missing else {})}))


class RewardSource(Protocol):
    """Computes a value for each episode: a function, a pool of processes, a server, a judge, a model."""

    @property
    def together(self) -> bool:
        """True if the episodes of a step are scored in one call; otherwise each call has one."""

    @property
    def num_at_once(self) -> int:
        """The number of calls that may run at the same time."""

    @property
    def takes_environment(self) -> bool:
        """True if it looks into the environment, which it is then given open."""

    async def score(self, trajectories: Sequence[Trajectory], env: HostedEnv | None = None) -> Sequence[object]:
        """Returns a value for `read_reward`, or a RewardFailure, per episode; raises RewardFailure if all of them fail.

        Raises ConfigError for a fault that every other episode would have too; it ends the run.
        """

    async def close(self) -> None:
        """Releases its resources; a second call does nothing."""


def read_reward(value: object) -> Reward:
    """Returns the Reward of a function, a process or a server.

    A number (also a bool, or numpy's), a Reward, a mapping with the fields of one (`{"value": 1, "success": true}`),
    or verl's `{"score": 1.0, ...}`, see `reward_of_score`. Raises a RewardFailure that is given, and InvalidReward for
    anything else, also for a value that raises while it is read.
    """
    try:
        return _read(value)
    except (InvalidReward, RewardFailure):
        raise
    except CODE_ERRORS as error:  # the boundary around the user's value
        if is_interrupt(error):
            raise
        raise InvalidReward(f"a reward that cannot be read: {RewardFailure.of(error)}") from error


def read_optional_reward(value: object) -> Reward | None:
    """Returns the Reward, or None for a reward that does not apply to the episode; see `WeightedRewards`."""
    return None if value is None else read_reward(value)


def reward_of_score(score: object, others: Mapping[object, object], turns: Sequence[float] | None = None) -> Reward:
    """Returns the reward of verl's score and of what is reported with it.

    Numbers are components, texts and None information. `acc` is the verdict too, where it is a bool.
    """
    rest = {str(name): other for name, other in others.items()}
    verdict = rest.get(VERDICT)
    return Reward(
        _number(score, "the score"),
        {name: cast(float, other) for name, other in rest.items() if isinstance(other, (Real, np.bool_))},
        turns=None if turns is None else tuple(turns),
        success=bool(verdict) if isinstance(verdict, (bool, np.bool_)) else None,
        info={name: cast(JSON, other) for name, other in rest.items() if other is None or isinstance(other, str)},
    )


def _read(value: object) -> Reward:
    if isinstance(value, Reward):
        return value
    if isinstance(value, RewardFailure):
        raise value
    if not isinstance(value, Mapping):
        return Reward(_number(value, "a reward"))
    if "score" in value and "value" not in value:
        return reward_of_score(value["score"], {name: other for name, other in value.items() if name != "score"})
    if "value" not in value or (unknown := [name for name in value if name not in FIELDS]):
        wrong = f"has the unknown {unknown}" if "value" in value else f"has no value: {sorted(map(str, value))}"
        raise InvalidReward(f"a reward as a mapping has value, and may have {', '.join(FIELDS[1:])}; this {wrong}")
    fields = {name: entry for name, entry in value.items() if entry is not None or name == "value"}
    for name in ("components", "info"):
        if not isinstance(fields.get(name, {}), Mapping):
            raise InvalidReward(f"the {name} of a reward are a mapping, got {fields[name]!r:.80}")
    if not isinstance(fields.get("turns", ()), (list, tuple)):
        raise InvalidReward(f"the turns of a reward are a list of numbers, got {fields['turns']!r:.80}")
    return Reward(**fields)


def _number(value: object, what: str) -> float:
    if not isinstance(value, (Real, np.bool_)):
        hint = "; write float(...) around it" if hasattr(value, "item") else ""
        raise InvalidReward(f"{what} is a number, got {type(value).__name__} {value!r:.80}{hint}")
    if not is_reward(value):
        raise InvalidReward(f"{what} is a finite number, at most {MAX_REWARD:g}, got {value!r:.80}")
    return float(value)


def _as_json(info: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Returns the information as a record can hold it; what JSON has no form for is its text."""

    def plain(value: object) -> object:
        return dict(value) if isinstance(value, Mapping) else str(value)

    try:
        return cast("Mapping[str, JSON]", json.loads(json.dumps(info, allow_nan=False, default=plain)))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidReward(f"the info of a reward is what JSON can hold: {error}") from error


def apply_reward(trajectory: Trajectory, reward: Reward) -> Trajectory:
    """Returns the trajectory with the reward in place of its own; raises InvalidReward if the turns do not match."""
    num_turns = len(trajectory.turns)
    values = reward.turns if reward.turns is not None else (*(0.0,) * (num_turns - 1), reward.value)
    if len(values) != num_turns:
        raise InvalidReward(f"a reward has a number for each of the {num_turns} turns, got {len(values)}")
    metrics_before = {name: number for name, number in trajectory.metrics.items() if not name.startswith(COMPONENT)}
    numbers = {f"{COMPONENT}{name}": number for name, number in reward.components.items() if number is not None}
    metrics = metrics_before | numbers
    if reward.success is not None:
        metrics["success"] = float(reward.success)
    info: dict[str, JSON] = {ENVIRONMENT: trajectory.reward, **trajectory.info}
    info.pop(NOTE, None)
    return replace(
        trajectory,
        turns=tuple(replace(turn, reward=value) for turn, value in zip(trajectory.turns, values, strict=True)),
        metrics=metrics,
        info={**info, NOTE: reward.info} if reward.info else info,
    )


def components_of(trajectory: Trajectory) -> dict[str, float]:
    """Returns the components of an episode's reward by name; NaN for one that does not apply to it."""
    note = trajectory.info.get(NOTE)
    missing = note.get(NOT_APPLICABLE) if isinstance(note, Mapping) else None
    components = {name: value for name, value in trajectory.metrics.items() if name.startswith(COMPONENT)}
    return {
        **(dict.fromkeys(map(str, missing), math.nan) if isinstance(missing, (list, tuple)) else {}),
        **{name.removeprefix(COMPONENT): value for name, value in components.items()},
    }


def apply_failure(trajectory: Trajectory, failure: RewardFailure) -> Trajectory:
    """Returns the trajectory as if its environment failed: without a reward, it affects neither statistics nor loss."""
    info: dict[str, JSON] = {"traceback": failure.traceback} if failure.traceback else {}
    return replace(
        trajectory,
        status=Status.ENV_ERROR,
        stop_reason=StopReason.ENV_ERROR,
        error=f"the reward failed: {failure}",
        info={**trajectory.info, **info},
    )


def with_environment_reward(trajectory: Trajectory) -> Trajectory:
    """Returns a trajectory whose reward was replaced before with the environment's again, all of it on its last turn.

    So a function that builds on the environment's reward finds it in recorded episodes, too.
    """
    earned = trajectory.info.get(ENVIRONMENT)
    if not is_reward(earned) or not trajectory.turns:
        return trajectory
    *first, last = trajectory.turns
    turns = (*(replace(turn, reward=0.0) for turn in first), replace(last, reward=float(cast(float, earned))))
    return replace(trajectory, turns=turns)
