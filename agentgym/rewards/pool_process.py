"""A process of a RewardPool: reads episodes from its standard input, and writes rewards to its standard output.

A message is preceded by its length in eight bytes. The function's own output goes to standard error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, BinaryIO

from agentgym.errors import ConfigError, UserCodeFault
from agentgym.rewards.function import RewardCall, find_reward
from agentgym.rewards.pool import LENGTH, PoolJob
from agentgym.rewards.reward import RewardFailure, read_optional_reward
from agentgym.rollout.hosting.env_code import attempt
from agentgym.trajectory import Trajectory

GRACE_S = 2.0
"""The seconds after a time-out at which a process ends by itself if its parent is gone and did not kill it."""


def main() -> int:
    """Serves until standard input ends."""
    questions, answers = _pipes()
    job: PoolJob = _read(questions)
    _limit_memory(job.memory_mb)
    failure, call = attempt(lambda: RewardCall.of(find_reward(job.function), job.settings, name=job.function))
    if call is None:
        assert failure is not None
        _write(answers, _error_to_json((failure.__cause__ if isinstance(failure, UserCodeFault) else None) or failure))
        return 1
    if call.takes_environment:
        words = (
            f"reward {job.function!r} takes the environment, which no process of a pool has: leave reward.manner out"
        )
        _write(answers, _error_to_json(ConfigError(words)))
        return 1
    _write(answers, {"together": call.together})
    while (trajectories := _read(questions)) is not None:
        signal.setitimer(signal.ITIMER_REAL, job.timeout_s + GRACE_S)  # SIGALRM ends the process, whatever hangs
        answer = _answer(call, trajectories)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, answer)
    return 0


def _answer(call: RewardCall, trajectories: list[Trajectory]) -> dict[str, Any]:
    def values() -> list[object]:
        result = call(trajectories)
        if inspect.isawaitable(result):
            result = asyncio.run(_await_value(result))
        return [_as_json(value) for value in call.values(result, len(trajectories))]

    error, scored = attempt(values)
    return {"values": scored} if error is None else _error_to_json(error)


async def _await_value(value: Awaitable[object]) -> object:
    return await value


def _as_json(value: object) -> object:
    """Returns a reward as JSON, or the error of an invalid one, so that only its own episode fails."""
    error, reward = attempt(lambda: read_optional_reward(value))
    if error is not None:
        return {"refused": _error_to_json(error)}
    return None if reward is None else dataclasses.asdict(reward)


def _error_to_json(error: BaseException) -> dict[str, Any]:
    failure = RewardFailure.of(error)
    return {
        "kind": type(error).__name__,
        "words": str(error),
        "error": str(failure),
        "traceback": failure.traceback,
    }


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """Opens the pipes to the parent, separate from the function's own input and output."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return questions, answers


def _limit_memory(memory_mb: int | None) -> None:
    """Limits the memory beyond that which Python and its libraries use already."""
    if memory_mb is None:
        return
    statm = Path("/proc/self/statm")
    num_bytes = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    limit = num_bytes + memory_mb * (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(pipe: BinaryIO) -> Any:
    head = pipe.read(LENGTH.size)
    return pickle.loads(pipe.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def _write(pipe: BinaryIO, answer: dict[str, Any]) -> None:
    data = json.dumps(answer, default=str).encode()
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


if __name__ == "__main__":
    sys.exit(main())
