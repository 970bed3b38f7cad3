"""agentgym: a Gymnasium for language-model agents.

`gymnasium.make("TextGame-v0")` works in a program that imports only gymnasium: installing agentgym installs a hook that
registers the bundled environments when Gymnasium is imported. Where Python runs no hooks (`PYTHONPATH`, `pip install
--target`), import agentgym after gymnasium.
"""

import sys
from importlib import import_module

from agentgym.envs.plugin import register_envs

__version__ = "0.1.0"

_HOMES = {
    "EvalConfig": "evaluation",
    "TrainConfig": "trainers.config",
    "Trainer": "trainers.trainer",
    "create_engine": "evaluation",
    "evaluate": "evaluation",
    "run_episode": "evaluation",
}
"""Where the names of `agentgym` itself live; each is loaded when it is first asked for. Their types: __init__.pyi."""

if "gymnasium" in sys.modules:
    register_envs()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"agentgym.{_HOMES[name]}"), name)
