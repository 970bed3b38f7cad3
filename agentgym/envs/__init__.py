"""Text environments: the base classes, the bundled environments and their policies."""

if __name__ != "agentgym.envs":
    raise ImportError(f"{__name__!r} is a door for readers of the repository; import agentgym.envs instead")

from agentgym.envs.action import Action
from agentgym.envs.spaces import Text
from agentgym.envs.text_env import EpisodeOver, TextEnv
from agentgym.envs.tool_env import ToolEnv

__all__ = ["Action", "EpisodeOver", "Text", "TextEnv", "ToolEnv"]
