"""Plays recorded episodes again, with the recorded actions, and compares what the environment answers and rewards."""

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
COUNTED = ("num_turns", "num_summaries", *call_counts(()))
"""The metrics that the rollout counts itself."""
CUT = (StopReason.TURN_TOKENS, StopReason.TRAJECTORY_TOKENS, StopReason.CONTEXT)
"""The reasons why a reply may not have gone to the environment."""


class Replay:
    """Checks the property `replay`.

    `foreign_rewards` is the reason why the environment's own rewards are not the recorded ones, "" if they are;
    `end_thinking` is the text that closes the model's reasoning, and `served` are the phases that outside agents
    played. A `share` of all episodes is played again, drawn at random from a fixed seed.
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
        self._served = served
        self._share = share
        self._random = random.Random(0)
        self._end_thinking = end_thinking
        self._makers: dict[str, _Maker] = {}

    def add(self, ledger: Ledger, line: int, record: EpisodeRecord) -> None:
        """Plays one episode again; see `Recomputation.add`."""
        trajectory = record.trajectory
        if self._random.random() >= self._share:
            ledger.skip(REPLAY.name, f"a share of {self._share:g} of the episodes is played again")
            return
        maker = self._maker(trajectory.task)
        reason = "an agent outside played it" if record.phase in self._served else maker.reason or _why_not(trajectory)
        if reason:
            ledger.skip(REPLAY.name, reason)
            return
        gap = self._difference(maker, trajectory)
        if gap.failure:
            ledger.skip(REPLAY.name, f"{trajectory.task.env_id} cannot be played here: {gap.failure}")
            return
        if gap.problem and self._difference(maker, trajectory) != gap:
            maker.reason = f"{trajectory.task.env_id} does not answer the same actions in the same way twice"
            ledger.skip(REPLAY.name, maker.reason)
            return
        ledger.check(REPLAY.name, Violation(line, turn=gap.turn, problem=gap.problem) if gap.problem else None)

    def close(self, ledger: Ledger) -> None:
        """Records what was left out of the comparison."""
        if self._foreign_rewards and ledger.tally(REPLAY.name).num_checked:
            ledger.tally(REPLAY.name).skipped[self._foreign_rewards] = ledger.tally(REPLAY.name).num_checked

    def _maker(self, task: Task) -> _Maker:
        key = json.dumps([task.env_id, task.kwargs], sort_keys=True, default=dict)
        if key not in self._makers:
            self._makers[key] = _Maker.of(task)
        return self._makers[key]

    def _difference(self, maker: _Maker, trajectory: Trajectory) -> _Found:
        try:
            env = maker.make()
        except Exception as error:  # noqa: BLE001 - the boundary around the user's environment
            return _Found(failure=_line(error))
        try:
            return self._compare_episode(env, trajectory)
        except Exception as error:  # noqa: BLE001 - the boundary around the user's environment
            return _Found(failure=_line(error))
        finally:
            env.close()

    def _compare_episode(self, env: TextEnv, trajectory: Trajectory) -> _Found:
        task = trajectory.task
        answer = read_reset(env.reset(seed=task.seed, options=dict(task.options) or None))
        turns, answers = _answered_turns(trajectory, own_rewards=not self._foreign_rewards), [answer]
        for number, turn in turns:
            if answer.terminated or answer.truncated:
                return _Found(number, "the environment ended the episode before this turn", answers=tuple(answers))
            answer = read_step(env.step(Action.from_message(turn.message)))
            problem = reply_problem(turn.message, self._end_thinking)
            answer = answer if problem is None else answer.preceded_by(problem)
            answers.append(answer)
            if mismatch := self._problem(answer, turn):
                return _Found(number, mismatch, answers=tuple(answers))
        mismatch = self._ending_problem(answer, trajectory) if turns else ""
        return _Found(None, mismatch, answers=tuple(answers) if mismatch else ())

    def _problem(self, answer: EnvStep, turn: Turn) -> str:
        """Returns how an answer differs from the recorded one; "" if it does not."""
        if answer.observation != turn.observation:
            return f"the environment answers {_short(answer.observation)}, recorded is {_short(turn.observation)}"
        if answer.tool_results != turn.tool_results:
            return "the tools give other results than those that are recorded"
        reward = turn.reward if turn.reward is not None else 0.0
        if not self._foreign_rewards and not math.isclose(answer.reward, reward, rel_tol=1e-9, abs_tol=1e-12):
            return f"the environment rewards it with {answer.reward}, recorded is {turn.reward}"
        return ""

    def _ending_problem(self, answer: EnvStep, trajectory: Trajectory) -> str:
        """Returns why the last answer is not the recorded end; "" if it is."""
        if answer.terminated != (trajectory.status is Status.COMPLETED):
            ends = "ends" if answer.terminated else "does not end"
            return f"the environment {ends} the episode, recorded is {trajectory.status} ({trajectory.stop_reason})"
        metrics, recorded = answer.metrics(), trajectory.metrics
        names = [] if self._foreign_rewards else [name for name in metrics if name in recorded and name not in COUNTED]
        for name in names:
            if not math.isclose(recorded[name], metrics[name], rel_tol=1e-9, abs_tol=1e-12):
                return f"the environment gives the metric {name}={metrics[name]:g}, recorded is {recorded[name]:g}"
        return _info_problem(answer.extras(), trajectory.info)


@dataclass(slots=True)
class _Maker:
    """The factory of a task's environment, or the reason why its episodes are not played again."""

    make: Callable[[], TextEnv]
    reason: str = ""

    @classmethod
    def of(cls, task: Task) -> _Maker:
        def nothing() -> TextEnv:
            raise AssertionError("an environment with a reason is not made")

        if task.kwargs.get("opponent") == SELF:
            return cls(nothing, "the moves of the other seats of a game are in other episodes")
        if foreign := [name for name, value in task.kwargs.items() if _is_code(value)]:
            return cls(
                nothing, f"the keyword {foreign[0]} of {task.env_id} names code that may ask a model or a server"
            )
        try:
            make = resolve_env(task.env_id, task.kwargs)
            env = make()
            has_card = card_of(task.env_id, env) is not None
            env.close()
        except Exception as error:  # noqa: BLE001 - the boundary around the user's environment
            return cls(nothing, f"{task.env_id} cannot be made here: {_line(error)}")
        lacks = f"{task.env_id} has no card, which claims that an episode depends on its seed and its actions alone"
        return cls(make, "" if has_card else lacks)


@dataclass(frozen=True, slots=True)
class _Found:
    """The first turn that differs, and how; or why the episode could not be played."""

    turn: int | None = None
    problem: str = ""
    failure: str = ""
    answers: tuple[EnvStep, ...] = ()
    """The answers of the environment up to there, if something differs."""


def _why_not(trajectory: Trajectory) -> str:
    if not trajectory.status.trainable:
        return "the episode failed"
    if any(result.error == "timeout" for turn in trajectory.turns for result in turn.tool_results):
        return "a tool timed out, which depends on the machine"
    return ""


def _answered_turns(trajectory: Trajectory, *, own_rewards: bool) -> list[tuple[int, Turn]]:
    """Returns the turns that went to the environment, with their numbers."""
    turns = [(number, turn) for number, turn in enumerate(trajectory.turns) if not turn.asked]
    if trajectory.status is Status.TRUNCATED and trajectory.stop_reason in CUT and turns:
        last = turns[-1][1]
        rewarded = own_rewards and bool(last.reward)  # a reward from elsewhere says nothing of the environment
        if last.finish_reason == "length" and not (last.observation or last.tool_results or rewarded):
            turns.pop()
    return turns


def _info_problem(info: Mapping[str, JSON], recorded: Mapping[str, JSON]) -> str:
    plain: Mapping[str, JSON] = json.loads(json.dumps(info, default=dict))
    other = [name for name, value in plain.items() if name in recorded and recorded[name] != value]
    return f"the environment gives another info[{other[0]!r}] than the one that is recorded" if other else ""


def _is_code(value: JSON) -> bool:
    """Returns True if a keyword is the path of a user's code, or an address."""
    return isinstance(value, str) and ":" in value


def _line(error: Exception) -> str:
    line = str(error).strip().split("\n")[0]
    return line if isinstance(error, AgentGymError) else f"{type(error).__name__}: {line}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:97]}...")
