"""The base of all episode loops: turns failures into statuses, calls the environment and reads its end."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from agentgym.chat_templates.formats.reply import reply_problem
from agentgym.envs.base.action import Action
from agentgym.envs.catalog.resolve import command_name
from agentgym.errors import AgentGymError, EngineError, EnvironmentFault, RenderError
from agentgym.rollout.episode.episode import Episode, EpisodeBuilder, EpisodeEnd
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.rollout.hosting.env_code import EnvCallTimeout
from agentgym.rollout.hosting.env_host import EnvHost
from agentgym.rollout.hosting.fair_gate import FairGate
from agentgym.rollout.hosting.hosted_env import Env, HostedEnv
from agentgym.rollout.hosting.tracebacks import fault_traceback
from agentgym.rollout.limits import Limits
from agentgym.trajectory import Status, StopReason, Trajectory
from agentgym.types import JSON, Message, ToolSpec

__all__ = [
    "FAULT_TOOL",
    "SURPLUS",
    "EpisodeLoop",
    "GameAbandoned",
    "failed_ending",
    "replay_info",
    "under_system_prompt",
]

SURPLUS = "surplus episode"
"""The message of a cancellation that ends an episode as data (status `cancelled`) instead of ending its task."""
FAULT_TOOL = "fault_tool"
"""The entry of an episode's info that names the tool whose fault ended it."""


class GameAbandoned(AgentGymError):
    """A game cannot continue for a reason other than its player: another seat of it failed, or it was over too soon."""


class EpisodeLoop(ABC):
    """Plays episodes with replies of any source; a subclass plays the conversation and releases its session."""

    has_environment = True
    """False if the environments are on another machine, so that no reward can look into them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.env_host = EnvHost(limits)
        self.fair_gate = FairGate()
        self.end_thinking = "</think>"
        """The mark with which the model closes its reasoning."""

    async def run(self, env: Env, episode: Episode) -> Trajectory:
        """Plays one episode in `env`, which stays open; see `play`."""
        hosted = self.env_host.adopt(env)
        try:
            return await self.play(hosted, episode)
        finally:
            hosted.release()

    async def play(self, env: HostedEnv, episode: Episode) -> Trajectory:
        """Plays one episode; every failure of environment or engine, and the deadline, become its status.

        Raises CancelledError if its task is cancelled (unless with the message SURPLUS), and any error of our own bugs.
        The engine's session is over when it returns.
        """
        builder = EpisodeBuilder(episode)
        try:
            async with asyncio.timeout(self.limits.deadline_s):
                ending = await self._converse(env, builder)
            builder.keep_info()
        except (EnvCallTimeout, EnvironmentFault) as error:
            ending = failed_ending(error, episode)
        except TimeoutError:
            line = f"the episode took over {self.limits.deadline_s:g} s (limits.deadline_s)"
            ending = EpisodeEnd(Status.TIMEOUT, StopReason.DEADLINE, line, replay_info(episode))
        except RenderError as error:
            ending = EpisodeEnd(Status.ENV_ERROR, StopReason.ENV_ERROR, f"RenderError: {error}", replay_info(episode))
        except EngineError as error:
            ending = EpisodeEnd(Status.ENGINE_ERROR, StopReason.ENGINE_ERROR, str(error) or "EngineError")
        except GameAbandoned as error:
            ending = EpisodeEnd(Status.CANCELLED, StopReason.CANCELLED, str(error), replay_info(episode))
        except asyncio.CancelledError as error:
            if SURPLUS not in error.args:
                raise
            ending = EpisodeEnd(Status.CANCELLED, StopReason.CANCELLED, "enough groups were finished without it")
        finally:
            await self._end_session(episode.session)
        return builder.finish(ending)

    @abstractmethod
    async def _converse(self, env: HostedEnv, builder: EpisodeBuilder) -> EpisodeEnd:
        """Plays the conversation itself, to its regular end."""

    @abstractmethod
    async def _end_session(self, session: str) -> None:
        """Releases the session of the episode's replies; raises nothing."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the source of the replies; a second call does nothing."""

    async def _reset(self, env: HostedEnv, builder: EpisodeBuilder) -> tuple[list[Message], tuple[ToolSpec, ...]]:
        """Resets the environment; returns the messages and the tools that the conversation begins with."""
        await self.fair_gate.wait_turn()
        task = builder.episode.task
        answer = await env.reset(task.seed, dict(task.options) or None)
        builder.task_info = env.facts.task_info
        return under_system_prompt(env, answer.messages), env.facts.tool_specs

    def _may_answer(self, cut: StopReason) -> bool:
        return cut is StopReason.TURN_TOKENS and self.limits.cut_reply == "answer"

    async def _act(self, env: HostedEnv, builder: EpisodeBuilder, message: Message) -> EnvStep:
        """Gives the reply to the environment and closes the turn with its answer."""
        started = time.perf_counter()
        answer = self._with_note(await env.step(Action.from_message(message)), message)
        builder.end_turn(answer, time.perf_counter() - started)
        return answer

    def _with_note(self, answer: EnvStep, message: Message) -> EnvStep:
        """Returns the environment's answer to the reply, after a note on what is wrong with the reply."""
        problem = reply_problem(message, self.end_thinking)
        return answer if problem is None else answer.preceded_by(problem)

    def _ending(self, answer: EnvStep, num_turns: int) -> EpisodeEnd | None:
        """Returns how the episode ends with this answer, or None if it continues."""
        at_limit = num_turns >= self.limits.max_turns
        if not (answer.terminated or answer.truncated or at_limit):
            return None
        if answer.terminated:
            return EpisodeEnd(Status.COMPLETED, StopReason.TERMINATED)
        return EpisodeEnd(Status.TRUNCATED, StopReason.ENV_TRUNCATED if answer.truncated else StopReason.MAX_TURNS)


def under_system_prompt(env: HostedEnv, messages: Sequence[Message]) -> list[Message]:
    """Returns the messages, after the environment's system prompt unless they have one of their own."""
    system_prompt = env.facts.system_prompt
    if system_prompt and not (messages and messages[0].role == "system"):
        return [Message("system", system_prompt), *messages]
    return list(messages)


def failed_ending(error: EnvironmentFault | EnvCallTimeout, episode: Episode) -> EpisodeEnd:
    """Returns the ending of an episode whose environment failed, with its traceback (without our own frames on top)."""
    info = replay_info(episode)
    text = fault_traceback(error)
    if text is not None:
        info["traceback"] = text
    if isinstance(error, EnvCallTimeout):
        return EpisodeEnd(Status.TIMEOUT, StopReason.DEADLINE, str(error), info)
    if error.tool:
        info[FAULT_TOOL] = error.tool
    return EpisodeEnd(Status.ENV_ERROR, StopReason.ENV_ERROR, str(error), info)


def replay_info(episode: Episode) -> dict[str, JSON]:
    """Returns the information that a person needs to reproduce the failure."""
    task = episode.task
    if task.options:  # a command line cannot contain them
        return {"replay": f"{task.env_id}: reset(seed={task.seed}, options=...) with the options of the task"}
    return {"replay": f"agentgym play {command_name(task.env_id, task.kwargs)} --seed {task.seed}"}
