"""Makes the environment that a user names; errors of the user's own code are shown as theirs, and not as ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from agentgym.cli.terminal import printable
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.catalog.resolve import make_env
from agentgym.errors import AgentGymError
from agentgym.rollout.hosting.env_code import attempt, unwrap_user_outcome
from agentgym.rollout.hosting.tracebacks import user_traceback
from agentgym.types import JSON

__all__ = ["load_env", "show_traceback"]


def load_env(name: str, kwargs: Mapping[str, JSON]) -> TextEnv:
    """Makes an environment; raises EnvironmentFault when its module or its constructor raises."""
    return unwrap_user_outcome(attempt(lambda: make_env(name, kwargs)), f"{name} cannot be made")


def show_traceback(fault: AgentGymError) -> None:
    """Prints the traceback of the user's error, from the user's own code on, to standard error."""
    if fault.__cause__ is not None:
        sys.stdout.flush()
        print(printable(user_traceback(fault.__cause__)), file=sys.stderr, flush=True)
