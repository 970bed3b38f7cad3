"""agentgym: a Gymnasium for language-model agents.

`gymnasium.make("TextGame-v0")` works in a program that imports only gymnasium: installing agentgym installs a hook that
registers the bundled environments when Gymnasium is imported. Where Python runs no hooks (`PYTHONPATH`, `pip install
--target`), import agentgym after gymnasium.
"""

import sys

from agentgym.lazy_exports import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_exports(
    __name__,
    {  # their types are in __init__.pyi
        "AgentEpisode": "rollout",
        "EvalConfig": "evaluation",
        "TextEnv": "envs",
        "ToolEnv": "envs",
        "TrainConfig": "trainers",
        "Trainer": "trainers",
        "Trajectory": "trajectory",
        "create_engine": "evaluation",
        "evaluate": "evaluation",
        "run_episode": "evaluation",
        "tool": "tools",
    },
)

if "gymnasium" in sys.modules:
    from agentgym.envs.catalog.plugin import register_envs  # here: a command has no need of it, and starts sooner

    register_envs()
