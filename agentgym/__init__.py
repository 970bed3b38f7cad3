"""agentgym: a Gymnasium for language-model agents.

`gymnasium.make("TextGame-v0")` works in a program that imports only gymnasium: installing agentgym installs a hook that
registers the bundled environments when Gymnasium is imported. Where Python runs no hooks (`PYTHONPATH`, `pip install
--target`), import agentgym after gymnasium.
"""

import sys

from agentgym.envs.plugin import register_envs

__version__ = "0.1.0"

if "gymnasium" in sys.modules:
    register_envs()
