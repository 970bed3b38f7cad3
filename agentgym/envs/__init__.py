"""Text environments: the base classes, the bundled environments and their policies."""

from typing import TYPE_CHECKING

from agentgym.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agentgym.envs.base.action import Action
    from agentgym.envs.base.card import CARDS, Difficulty, EnvCard
    from agentgym.envs.base.docker_env import DockerEnv
    from agentgym.envs.base.policies import POLICIES, Policy, Script, ScriptedPolicy, policy_for
    from agentgym.envs.base.seeds import EVAL_SEED_START
    from agentgym.envs.base.spaces import Text
    from agentgym.envs.base.text_env import EpisodeOver, TextEnv
    from agentgym.envs.base.tool_env import ToolEnv
    from agentgym.envs.catalog.resolve import make_env, resolve_env
    from agentgym.envs.tasks.prompt import row_messages

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
    "Script",
    "ScriptedPolicy",
    "Text",
    "TextEnv",
    "ToolEnv",
    "make_env",
    "policy_for",
    "resolve_env",
    "row_messages",
]

if __name__ != "agentgym.envs":
    raise ImportError(f"{__name__!r} is a door for readers of the repository; import agentgym.envs instead")

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Action": "base.action",
        "CARDS": "base.card",
        "Difficulty": "base.card",
        "DockerEnv": "base.docker_env",
        "EVAL_SEED_START": "base.seeds",
        "EnvCard": "base.card",
        "EpisodeOver": "base.text_env",
        "POLICIES": "base.policies",
        "Policy": "base.policies",
        "Script": "base.policies",
        "ScriptedPolicy": "base.policies",
        "Text": "base.spaces",
        "TextEnv": "base.text_env",
        "ToolEnv": "base.tool_env",
        "make_env": "catalog.resolve",
        "policy_for": "base.policies",
        "resolve_env": "catalog.resolve",
        "row_messages": "tasks.prompt",
    },
)
