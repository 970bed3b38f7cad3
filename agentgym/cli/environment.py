"""Makes the environment that a user names: what the user's own code raises is shown as theirs, and not as ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypeVar

from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.catalog.resolve import make_env
from agentgym.errors import AgentGymError, EnvironmentFault
from agentgym.rollout.hosting.env_threads import Outcome, attempt
from agentgym.rollout.hosting.tracebacks import user_traceback
from agentgym.types import JSON

__all__ = ["load_env", "opened", "show_traceback"]

T = TypeVar("T")


def load_env(name: str, kwargs: Mapping[str, JSON]) -> TextEnv:
    """A new environment; raises EnvironmentFault when its module or its constructor raises."""
    return opened(attempt(lambda: make_env(name, kwargs)), f"{name} cannot be made")


def opened(outcome: Outcome[T], what: str) -> T:
    """The value of an outcome; our own errors are raised as they are, the user's as an EnvironmentFault on `what`."""
    error, value = outcome
    if isinstance(error, AgentGymError):
        raise error
    if error is not None:
        first_line = str(error).strip().partition("\n")[0]
        raise EnvironmentFault(f"{what}: {type(error).__name__}: {first_line}") from error
    return value  # type: ignore[return-value]  # no error: it is the value


def show_traceback(fault: AgentGymError) -> None:
    """The traceback of what the user's code raised, from there on, on standard error."""
    if fault.__cause__ is not None:
        sys.stdout.flush()
        print(user_traceback(fault.__cause__), file=sys.stderr, flush=True)
