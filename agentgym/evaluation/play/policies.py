"""Lets a policy that needs no model (oracle, cheat, random) play through the rollout, as if it were an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.policies import policy_for, policy_reply
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.base.wrapped_env import WrappedEnv
from agentgym.envs.catalog.resolve import command_name, make_env
from agentgym.errors import EnvironmentFault, describe_error
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.history import History
from agentgym.rollout.episode.replies import reply_ids
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.hosting.env_code import attempt
from agentgym.rollout.hosting.env_host import LocalEnv
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.limits import Limits
from agentgym.trajectory import Trajectory
from agentgym.types import Message, Task

__all__ = ["PlayedEnv", "PolicyLoop", "played_env"]


class PlayedEnv(WrappedEnv):
    """An environment with the policy that plays it; `reset` also begins the policy's episode."""

    def __init__(self, env: TextEnv, kind: str) -> None:
        super().__init__(env, env.max_turns)
        self.runs_inline = env.runs_inline
        self.inner = env
        self.kind = kind
        self.policy = policy_for(self.inner, kind)
        self.policy_seed = 0
        self._observation = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Begins the episode of environment and policy."""
        observation, info = super().reset(seed=seed, options=options)
        self._observation = observation
        self.policy.reset(self.inner, observation, self.policy_seed)
        return observation, info

    def step(self, action: str) -> StepResult:
        """Steps the environment, and stores what the policy sees next."""
        result = super().step(action)
        self._observation = result[0]
        return result

    def next_message(self) -> Message:
        """Returns the policy's reply to the last observation."""
        return policy_reply(self.policy, self._observation)


def played_env(kind: str) -> Callable[[Task], PlayedEnv]:
    """Returns a Sampler's factory of environments: the task's environment, played by the policy `kind`."""
    return lambda task: PlayedEnv(make_env(task.env_id, task.kwargs), kind)


class PolicyLoop(RolloutLoop):
    """A RolloutLoop whose replies come from the policy of each episode's own `PlayedEnv`.

    Replies are rendered as a model would have to sample them, so that such a run can be read, verified and trained on
    like any other. A policy that raises counts as a fault of its environment.
    """

    def __init__(self, renderer: Renderer, limits: Limits, *, history: History = "append") -> None:
        engine = ScriptedEngine(self._reply_of, vocab_size=renderer.vocab_size)
        super().__init__(engine, renderer, limits, history=history)
        self._envs: dict[str, PlayedEnv] = {}

    async def play(self, env: HostedEnv, episode: Episode) -> Trajectory:
        """Plays one episode; `env` hosts a PlayedEnv."""
        assert isinstance(env, LocalEnv) and isinstance(env.env, PlayedEnv)
        env.env.policy_seed = episode.seed(0)
        self._envs[episode.session] = env.env
        try:
            trajectory = await super().play(env, episode)
        finally:
            del self._envs[episode.session]
        task = episode.task
        if "replay" not in trajectory.info or task.options:
            return trajectory
        command = f"agentgym eval --env {command_name(task.env_id, task.kwargs)} --policy {env.env.kind}"
        command += f" -n {task.seed - EVAL_SEED_START + 1} --seed {episode.run_seed}"  # up to this task, by its moves
        return replace(trajectory, info={**trajectory.info, "replay": command})

    def _reply_of(self, session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        error, message = attempt(self._envs[session].next_message)
        if message is None:
            raise EnvironmentFault(f"the policy failed: {error and describe_error(error)}") from error
        return reply_ids(self.renderer, message)
