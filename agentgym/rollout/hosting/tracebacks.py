"""The traceback of an environment's failure, without the frames that lead to the environment's own code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import traceback
from pathlib import Path

from agentgym.errors import EnvironmentFault
from agentgym.rollout.hosting.hosted_env import DistantTraceback

__all__ = ["fault_traceback", "is_scaffolding", "user_traceback"]


def fault_traceback(error: BaseException) -> str | None:
    """Returns the traceback of the environment's error that caused this error, if there is one."""
    cause = error.__cause__
    while isinstance(cause, EnvironmentFault) and cause.__cause__ is not None:
        cause = cause.__cause__
    return None if cause is None else user_traceback(cause)


def user_traceback(error: BaseException) -> str:
    """Returns the traceback of what the environment raised, from the environment's own frame on."""
    if isinstance(error, DistantTraceback):
        return str(error)
    frames = error.__traceback__
    while frames is not None and frames.tb_next and is_scaffolding(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def is_scaffolding(path: str) -> bool:
    """Returns whether a frame of this file only leads to the environment's own code."""
    inner = path.replace("\\", "/").rpartition("/agentgym/")[2]
    ours = (
        "rollout/",
        "rewards/",
        "evaluation/",
        "trainers/",
        "data/",
        "cli/",
        "envs/base/policies.py",
        "envs/base/text_env.py",
        "envs/base/tool_env.py",
        "envs/base/wrapped_env.py",
        "envs/catalog/resolve.py",
        "tools/calling/",
        "loading.py",
        "settings/functions.py",
        "testing/",
        "registry.py",
    )
    is_waiting = path.startswith((str(Path(asyncio.__file__).parent), str(Path(concurrent.futures.__file__).parent)))
    return inner.startswith(ours) or path.startswith("<frozen importlib") or path == importlib.__file__ or is_waiting
