"""agentgym: a Gymnasium for language-model agents.

Importing it registers the bundled environments: `gymnasium.make("agentgym:TextGame-v0")` works in a program that
imports only gymnasium, and `gymnasium.make("TextGame-v0")` in one that imports agentgym too.
"""

__version__ = "0.1.0"

from agentgym.envs.plugin import register_envs

register_envs()
