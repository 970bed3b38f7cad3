"""The registry of reward functions by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from agentgym.registry import Registry

__all__ = ["REWARDS", "in_processes", "wants_processes"]

F = TypeVar("F", bound=Callable[..., object])

REWARDS: Registry[Callable[..., object]] = Registry(
    "reward", "One of your own is written 'path/to/file.py:name' or 'package.module:name'; `agentgym docs rewards`."
)
"""The scorers by name; `@REWARDS.register("mine")` adds your own. A pool looks the name up in its processes."""

_IN_PROCESSES: list[Callable[..., object]] = []


def in_processes(function: F) -> F:
    """Marks a function that may hang and cannot be stopped on a thread: by default it runs in a pool of processes."""
    _IN_PROCESSES.append(function)
    return function


def wants_processes(function: Callable[..., object]) -> bool:
    """True if the function was marked by `in_processes`."""
    return any(marked is function for marked in _IN_PROCESSES)
