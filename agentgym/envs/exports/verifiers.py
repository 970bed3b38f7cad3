"""An environment of agentgym as one of verifiers (0.3), for a package with `load_environment`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentgym.envs.adapters.namespaces import needs
from agentgym.envs.base.action import Action
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.envs.base.text_env import Info, TextEnv
from agentgym.envs.catalog.resolve import resolve_env
from agentgym.openai_wire import message_from_openai, message_to_openai
from agentgym.types import JSON, Message

try:
    import verifiers.legacy as vf
    from datasets import Dataset
    from verifiers.legacy.errors import InfraError
    from verifiers.legacy.utils.message_utils import normalize_messages
except ImportError as error:  # not there, or 0.4, which has no environments of this kind
    raise needs("verifiers below 0.4", "verifiers", error) from error

__all__ = ["ServedByVerifiers"]

ENV, REWARD, METRICS = "agentgym_env", "agentgym_reward", "agentgym_metrics"
"""The keys of a rollout's state: the environment, the sum of its rewards, and its numbers at the end."""


class ServedByVerifiers(vf.MultiTurnEnv):  # type: ignore[misc]  # the library has no types here
    """An environment of agentgym, by its name; row N of the dataset is its training seed N, or held-out seed N.

    The prompt and the tools of a row are those of the reset, when its rollout begins. Its rubric pays the sum of the
    environment's rewards, and shows `success`. An exception of the environment is an error of the rollout.
    """

    def __init__(
        self, name: str, env_kwargs: Mapping[str, JSON] | None = None, *, num_train: int = 1000, num_eval: int = 100
    ) -> None:
        self.make_served: Callable[[], TextEnv] = resolve_env(name, env_kwargs)
        env = self.make_served()
        tools = _tools(env)
        env.close()
        super().__init__(
            dataset=lambda: _rows(name, range(num_train)),
            eval_dataset=lambda: _rows(name, range(EVAL_SEED_START, EVAL_SEED_START + num_eval)),
            rubric=vf.Rubric(funcs=[reward, success], weights=[1.0, 0.0]),
            tool_defs=tools,
        )

    async def setup_state(self, state: Any) -> Any:
        """Begins an episode, and takes its prompt and its tools into the rollout."""
        env = state[ENV] = self.make_served()
        state[REWARD], state[METRICS] = 0.0, {}
        _, info = await _guard(env.areset(seed=state["info"]["seed"]))
        messages = info["messages"]
        if env.system_prompt and not any(message.role == "system" for message in messages):
            messages = (Message("system", env.system_prompt), *messages)
        state["prompt"] = _their_messages(messages)
        state["tool_defs"] = self._normalize_tool_defs(_tools(env)) or []
        return state

    async def env_response(self, messages: Any, state: Any, **rest: object) -> Any:
        """Plays the model's reply; the last answer of an episode ends the rollout."""
        reply = Action.from_message(_our_message(messages[-1]))
        _, paid, terminated, truncated, info = await _guard(state[ENV].astep(reply))
        if "history" in info:
            raise InfraError(f"{type(state[ENV]).__name__} rewrites its history, which verifiers does not")
        state[REWARD] += paid
        answer = _their_messages(info["messages"])
        if terminated or truncated:
            state[METRICS] = _numbers(info)
            state["final_env_response"] = answer
        return answer

    @vf.cleanup  # type: ignore[untyped-decorator]
    async def close_served(self, state: Any) -> None:
        """Closes the environment of a rollout."""
        env = state.pop(ENV, None)
        if env is not None:
            await env.aclose()


def reward(state: Any) -> float:
    """Returns what the environment paid in all."""
    return float(state.get(REWARD, 0.0))


def success(state: Any) -> float:
    """Returns the environment's verdict, else 1 if the reward is above 0."""
    return float(state.get(METRICS, {}).get("success", reward(state) > 0))


async def _guard(call: Any) -> Any:
    """Returns what a call of the environment returns; its exception is an error of the rollout."""
    try:
        return await call
    except Exception as error:  # the boundary: an environment is user code
        raise InfraError(f"the environment raised {type(error).__name__}: {error}") from error


def _rows(name: str, seeds: Iterable[int]) -> Any:
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{name}, seed {seed}"}], "info": {"seed": seed}} for seed in seeds]
    )


def _tools(env: TextEnv) -> list[dict[str, Any]]:
    specs = env.tool_specs
    return [{"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)} for spec in specs]


def _numbers(info: Info) -> dict[str, float]:
    return {name: float(value) for name, value in info.get("metrics", {}).items()}


def _their_messages(messages: Iterable[Message]) -> Any:
    return normalize_messages([message_to_openai(message) for message in messages])


def _our_message(message: Any) -> Message:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls or ()
    ]
    content = message.content
    parts = content if content is None or isinstance(content, str) else [part.model_dump() for part in content]
    reasoning = {} if message.reasoning_content is None else {"reasoning_content": message.reasoning_content}
    return message_from_openai({"role": "assistant", "content": parts, "tool_calls": calls or None, **reasoning})
