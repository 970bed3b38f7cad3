"""Text environments: the base classes, the bundled environments and their policies."""

if __name__ != "agentgym.envs":
    raise ImportError(f"{__name__!r} is a door for readers of the repository; import agentgym.envs instead")

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentgym.envs.action import Action
    from agentgym.envs.card import CARDS, Difficulty, EnvCard
    from agentgym.envs.docker_env import DockerEnv
    from agentgym.envs.policies import POLICIES, Policy, policy_for
    from agentgym.envs.prompt import row_messages
    from agentgym.envs.resolve import make_env, resolve_env
    from agentgym.envs.seeds import EVAL_SEED_START
    from agentgym.envs.spaces import Text
    from agentgym.envs.text_env import EpisodeOver, TextEnv
    from agentgym.envs.tool_env import ToolEnv

__all__ = [
    "CARDS",
    "EVAL_SEED_START",
    "POLICIES",
    "Action",
    "Difficulty",
    "DockerEnv",
    "EnvCard",
    "EpisodeOver",
    "Policy",
    "Text",
    "TextEnv",
    "ToolEnv",
    "make_env",
    "policy_for",
    "resolve_env",
    "row_messages",
]

_HOMES = {
    "CARDS": "card",
    "EVAL_SEED_START": "seeds",
    "POLICIES": "policies",
    "Action": "action",
    "Difficulty": "card",
    "DockerEnv": "docker_env",
    "EnvCard": "card",
    "EpisodeOver": "text_env",
    "Policy": "policies",
    "Text": "spaces",
    "TextEnv": "text_env",
    "ToolEnv": "tool_env",
    "make_env": "resolve",
    "policy_for": "policies",
    "resolve_env": "resolve",
    "row_messages": "prompt",
}


def __getattr__(name: str) -> object:
    """Loads a public name when it is first used: registering the environments imports this package and needs none."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"agentgym.envs.{_HOMES[name]}"), name)
