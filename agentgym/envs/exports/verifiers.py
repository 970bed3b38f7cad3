"""An environment of agentgym as one of verifiers 0.4, for a package that `vf-eval` and trainers load by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import aiohttp

from agentgym.envs.base.action import Action
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.envs.catalog.resolve import resolve_env
from agentgym.errors import ConfigError
from agentgym.openai_wire import message_from_openai, message_to_openai
from agentgym.types import JSON, Message

try:
    import verifiers.v1 as vf
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import default_harness_id  # not in 0.3
except ImportError as error:
    raise ConfigError(f"verifiers 0.4 cannot be imported ({error}): pip install 'verifiers>=0.4,<0.5'") from error

__all__ = ["ServedEnv", "ServedHarness", "ServedTaskset"]

assert default_harness_id
RESULT = "agentgym"
"""The key of a trace's info: the sum of the environment's rewards, and its numbers at the end."""


class ServedData(vf.TaskData):  # type: ignore[misc]  # the library has no types here
    """A seed of an environment: what the reset of an episode needs."""

    env: str
    env_kwargs: dict[str, Any]
    seed: int


class ServedTask(vf.Task[ServedData]):  # type: ignore[misc]
    """A task whose reward is what the environment paid."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def reward(self, trace: Any) -> float:
        """The sum of the environment's rewards."""
        return float(trace.info[RESULT]["reward"])

    @vf.metric  # type: ignore[untyped-decorator]
    async def numbers(self, trace: Any) -> Mapping[str, float]:
        """The environment's numbers at the end, with `success`: its verdict, else 1 if the reward is above 0."""
        result = trace.info[RESULT]
        return {"success": float(result["reward"] > 0), **result["metrics"]}


class ServedConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The tasks to load."""

    num_tasks: int = 1000
    held_out: bool = False
    """Held-out tasks in place of those to train on."""
    env_kwargs: dict[str, Any] = {}
    """Keywords of the environment's class, in addition to those of the package."""


class ServedTaskset(vf.Taskset[ServedTask, ServedConfig]):  # type: ignore[misc]
    """Task N is the environment's training seed N, or held-out seed N. A package names the environment."""

    env: ClassVar[str]
    env_kwargs: ClassVar[Mapping[str, JSON]] = {}

    def load(self) -> Iterator[ServedTask]:
        """The tasks; the prompt of one, which names it, is replaced by that of the reset."""
        keywords = {**self.env_kwargs, **self.config.env_kwargs}
        with contextlib.closing(resolve_env(self.env, keywords)()):  # a wrong keyword is reported before an episode
            start = EVAL_SEED_START if self.config.held_out else 0
        for seed in range(start, start + self.config.num_tasks):
            data = ServedData(prompt=f"{self.env}, seed {seed}", env=self.env, env_kwargs=keywords, seed=seed)
            yield ServedTask(data, self.config.task)


class ServedHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """The environment as the program that asks the model: its prompts, its tools, its turns, its end.

    An exception of the environment is an error of the rollout, and no reward.
    """

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(self, *parameters: Any) -> Any:
        """Plays an episode."""
        ctx, trace, _, endpoint, secret, _, data = parameters
        result: dict[str, Any] = {"reward": 0.0, "metrics": {}}
        trace.info[RESULT] = result
        env = resolve_env(data.env, data.env_kwargs)()
        headers, limits = {"Authorization": f"Bearer {secret}"}, aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, timeout=limits) as http:
            try:
                _, info = await env.areset(seed=data.seed)
                messages = list(info["messages"])
                if env.system_prompt and not any(message.role == "system" for message in messages):
                    messages.insert(0, Message("system", env.system_prompt))
                is_over = False
                while not is_over:
                    body: dict[str, Any] = {"model": ctx.model, "messages": [*map(message_to_openai, messages)]}
                    if env.tool_specs:
                        body["tools"] = [spec.to_openai() for spec in env.tool_specs]
                    async with http.post(f"{endpoint}/chat/completions", json=body) as answer:
                        if answer.status != 200:  # a limit of the run, or a failure that it has recorded
                            return vf.ProgramResult(exit_code=1, stdout="", stderr=await answer.text())
                        reply = message_from_openai((await answer.json())["choices"][0]["message"])
                    _, paid, terminated, truncated, info = await env.astep(Action.from_message(reply))
                    result["reward"] += paid
                    is_over = terminated or truncated
                    messages = list(info.get("history") or (*messages, reply, *info["messages"]))
                result["metrics"] = {name: float(value) for name, value in info.get("metrics", {}).items()}
            finally:
                await env.aclose()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class ServedEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """One agent, whose program runs in the process of verifiers."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=SubprocessConfig())


class ServedEnv(vf.Env[ServedEnvConfig]):  # type: ignore[misc]
    """One agent plays one task."""

    async def run(self, task: Any, agents: Any) -> None:
        """Plays an episode."""
        await agents.agent.run(task)
