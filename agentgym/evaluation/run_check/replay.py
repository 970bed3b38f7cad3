"""Plays recorded episodes again with the recorded actions, and compares the environment's answers and rewards."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from agentgym.chat_templates.formats.reply import reply_problem
from agentgym.envs.base.action import Action
from agentgym.envs.base.card import card_of
from agentgym.envs.base.opponents import SELF
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.catalog.resolve import resolve_env
from agentgym.errors import AgentGymError
from agentgym.rollout.episode.episode import call_counts
from agentgym.rollout.hosting.answer import EnvStep, read_reset, read_step
from agentgym.rollout.record.episodes_file import EpisodeRecord
from agentgym.rollout.record.ledger import Ledger, Property, Violation
from agentgym.trajectory import Status, StopReason, Trajectory, Turn
from agentgym.types import JSON, Task

__all__ = ["Replay"]

REPLAY = Property("replay", "the environment answers and rewards the recorded actions as recorded", "episodes")
COUNTS = ("num_turns", "num_summaries", *call_counts(()))
"""The metrics that the rollout counts, and not the environment."""
TOKEN_LIMITS = (StopReason.TURN_TOKENS, StopReason.TRAJECTORY_TOKENS, StopReason.CONTEXT)
"""The ends of an episode whose last reply may not have gone to the environment."""


class Replay:
    """Checks the property `replay`.

    `foreign_rewards` is the reason why the recorded rewards are not the environment's own, "" if they are;
    `end_thinking` is the text that closes the model's reasoning, and `served` are the phases that outside agents
    played. Only a `share` of all episodes is played, drawn at random from a fixed seed.
    """

    properties: tuple[Property, ...] = (REPLAY,)

    def __init__(
        self,
        *,
        foreign_rewards: str = "",
        end_thinking: str = "</think>",
        served: Collection[str] = (),
        share: float = 1.0,
    ) -> None:
        self._foreign_rewards = foreign_rewards
        self._served_phases = served
        self._share = share
        self._random = random.Random(0)
        self._end_thinking = end_thinking
        self._factories: dict[str, _EnvFactory] = {}

    def add(self, ledger: Ledger, line: int, record: EpisodeRecord) -> None:
        """Plays one episode again; see `Recomputation.add`."""
        trajectory = record.trajectory
        if self._random.random() >= self._share:
            ledger.skip(REPLAY.name, f"only a share of {self._share:g} of the episodes is played again")
            return
        factory = self._factory(trajectory.task)
        reason = "an outside agent played it" if record.phase in self._served_phases else ""
        reason = reason or factory.reason or _skip_reason(trajectory)
        if reason:
            ledger.skip(REPLAY.name, reason)
            return
        result = self._compare(factory, trajectory)
        if result.failure:
            ledger.skip(REPLAY.name, f"{trajectory.task.env_id} cannot be played here: {result.failure}")
            return
        # If a second replay differs from the first, the environment is random, and the record may be right.
        if result.problem and self._compare(factory, trajectory) != result:
            factory.reason = f"{trajectory.task.env_id} gives different answers to the same actions"
            ledger.skip(REPLAY.name, factory.reason)
            return
        ledger.check(REPLAY.name, Violation(line, turn=result.turn, problem=result.problem) if result.problem else None)

    def close(self, ledger: Ledger) -> None:
        """Records that rewards were left out of the comparison, and why."""
        if self._foreign_rewards and ledger.tally(REPLAY.name).num_checked:
            ledger.tally(REPLAY.name).skipped[self._foreign_rewards] = ledger.tally(REPLAY.name).num_checked

    def _factory(self, task: Task) -> _EnvFactory:
        key = json.dumps([task.env_id, task.kwargs], sort_keys=True, default=dict)
        if key not in self._factories:
            self._factories[key] = _EnvFactory.of(task)
        return self._factories[key]

    def _compare(self, factory: _EnvFactory, trajectory: Trajectory) -> _Comparison:
        try:
            env = factory.make()
        except Exception as error:  # noqa: BLE001 - the boundary around the user's environment
            return _Comparison(failure=_first_line(error))
        try:
            return self._compare_episode(env, trajectory)
        except Exception as error:  # noqa: BLE001 - the boundary around the user's environment
            return _Comparison(failure=_first_line(error))
        finally:
            env.close()

    def _compare_episode(self, env: TextEnv, trajectory: Trajectory) -> _Comparison:
        task = trajectory.task
        answer = read_reset(env.reset(seed=task.seed, options=dict(task.options) or None))
        turns, answers = _answered_turns(trajectory, own_rewards=not self._foreign_rewards), [answer]
        for number, turn in turns:
            if answer.terminated or answer.truncated:
                return _Comparison(number, "the environment ended the episode before this turn", answers=tuple(answers))
            answer = read_step(env.step(Action.from_message(turn.message)))
            problem = reply_problem(turn.message, self._end_thinking)
            answer = answer if problem is None else answer.preceded_by(problem)
            answers.append(answer)
            if mismatch := self._problem(answer, turn):
                return _Comparison(number, mismatch, answers=tuple(answers))
        mismatch = self._ending_problem(answer, trajectory) if turns else ""
        return _Comparison(None, mismatch, answers=tuple(answers) if mismatch else ())

    def _problem(self, answer: EnvStep, turn: Turn) -> str:
        """Returns how an answer differs from the recorded one; "" if it does not."""
        if answer.observation != turn.observation:
            return f"the environment answers {_shorten(answer.observation)}; {_shorten(turn.observation)} is recorded"
        if answer.tool_results != turn.tool_results:
            return "the tools give results that differ from the recorded ones"
        reward = turn.reward if turn.reward is not None else 0.0
        if not self._foreign_rewards and not math.isclose(answer.reward, reward, rel_tol=1e-9, abs_tol=1e-12):
            return f"the environment gives the reward {answer.reward}; {turn.reward} is recorded"
        return ""

    def _ending_problem(self, answer: EnvStep, trajectory: Trajectory) -> str:
        """Returns why the last answer is not the recorded end; "" if it is."""
        if answer.terminated != (trajectory.status is Status.COMPLETED):
            ends = "ends" if answer.terminated else "does not end"
            return f"the environment {ends} the episode; {trajectory.status} ({trajectory.stop_reason}) is recorded"
        metrics, recorded = answer.metrics(), trajectory.metrics
        names = [] if self._foreign_rewards else [name for name in metrics if name in recorded and name not in COUNTS]
        for name in names:
            if not math.isclose(recorded[name], metrics[name], rel_tol=1e-9, abs_tol=1e-12):
                return f"the environment gives the metric {name}={metrics[name]:g}; {recorded[name]:g} is recorded"
        return _info_problem(answer.extras(), trajectory.info)


@dataclass(slots=True)
class _EnvFactory:
    """The factory of a task's environment, or the reason why its episodes are not played again."""

    make: Callable[[], TextEnv]
    reason: str = ""

    @classmethod
    def of(cls, task: Task) -> _EnvFactory:
        def refuse() -> TextEnv:
            raise AssertionError("the episodes of this task are not played again")

        if task.kwargs.get("opponent") == SELF:
            return cls(refuse, "the moves of the other seats of a game are in other episodes")
        if foreign := [name for name, value in task.kwargs.items() if _is_code(value)]:
            return cls(refuse, f"the keyword {foreign[0]} of {task.env_id} names code that may ask a model or server")
        try:
            make = resolve_env(task.env_id, task.kwargs)
            env = make()
            has_card = card_of(task.env_id, env) is not None
            env.close()
        except Exception as error:  # noqa: BLE001 - the boundary around the user's environment
            return cls(refuse, f"{task.env_id} cannot be made here: {_first_line(error)}")
        no_card = f"{task.env_id} has no card, which claims that an episode depends on its seed and its actions alone"
        return cls(make, "" if has_card else no_card)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """An episode that was played again, compared with its record."""

    turn: int | None = None
    """The number of the first turn that differs; None if none does, or only the end of the episode."""
    problem: str = ""
    """The difference; "" if there is none."""
    failure: str = ""
    """The error that kept the episode from being played; "" if there was none."""
    answers: tuple[EnvStep, ...] = ()
    """The answers of the environment up to the difference; () if there is none."""


def _skip_reason(trajectory: Trajectory) -> str:
    """Returns why an episode cannot be compared; "" if it can."""
    if not trajectory.status.trainable:
        return "the episode failed"
    if any(result.error == "timeout" for turn in trajectory.turns for result in turn.tool_results):
        return "a tool timed out, which depends on the machine"
    return ""


def _answered_turns(trajectory: Trajectory, *, own_rewards: bool) -> list[tuple[int, Turn]]:
    """Returns the turns that went to the environment, with their numbers."""
    turns = [(number, turn) for number, turn in enumerate(trajectory.turns) if not turn.asked]
    if trajectory.status is Status.TRUNCATED and trajectory.stop_reason in TOKEN_LIMITS and turns:
        last = turns[-1][1]
        rewarded = own_rewards and bool(last.reward)  # a reward from elsewhere does not show an answer
        if last.finish_reason == "length" and not (last.observation or last.tool_results or rewarded):
            turns.pop()
    return turns


def _info_problem(info: Mapping[str, JSON], recorded: Mapping[str, JSON]) -> str:
    plain: Mapping[str, JSON] = json.loads(json.dumps(info, default=dict))
    other = [name for name, value in plain.items() if name in recorded and recorded[name] != value]
    return f"the environment gives an info[{other[0]!r}] that differs from the recorded one" if other else ""


def _is_code(value: JSON) -> bool:
    """Returns True if a keyword is the path of a user's code, or an address."""
    return isinstance(value, str) and ":" in value


def _first_line(error: Exception) -> str:
    line = str(error).strip().split("\n")[0]
    return line if isinstance(error, AgentGymError) else f"{type(error).__name__}: {line}"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:97]}...")
