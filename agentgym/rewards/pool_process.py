"""One process of a RewardPool: reads episodes from its standard input, writes rewards to its standard output.

Every message is its length in eight bytes and the message. Whatever the function itself prints goes to standard error.
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

from agentgym.errors import UserCodeFault
from agentgym.rewards.function import RewardCall, find_reward
from agentgym.rewards.pool import LENGTH, PoolJob
from agentgym.rewards.reward import RewardFailure, read_reward
from agentgym.rollout.hosting.env_threads import attempt
from agentgym.trajectory import Trajectory

GRACE_S = 2.0
"""Seconds after a time-out by which a process whose parent did not kill it (it is gone) ends by itself."""


def main() -> int:
    """Serves until standard input ends."""
    questions, answers = _pipes()
    job: PoolJob = _read(questions)
    _limit_memory(job.memory_mb)
    failure, call = attempt(lambda: RewardCall.of(find_reward(job.function), job.settings, name=job.function))
    if call is None:
        assert failure is not None
        _write(answers, _told((failure.__cause__ if isinstance(failure, UserCodeFault) else None) or failure))
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
            result = asyncio.run(_awaited(result))
        return [_as_json(one) for one in call.values(result, len(trajectories))]

    error, scored = attempt(values)
    return {"values": scored} if error is None else _told(error)


async def _awaited(value: Awaitable[object]) -> object:
    return await value


def _as_json(value: object) -> object:
    """A reward as JSON; of what is no reward, why, so that its own episode alone fails."""
    error, reward = attempt(lambda: read_reward(value))
    if reward is None:
        assert error is not None
        return {"refused": _told(error)}
    return dataclasses.asdict(reward)


def _told(error: BaseException) -> dict[str, Any]:
    failure = RewardFailure.of(error)
    return {
        "kind": type(error).__name__,
        "words": str(error),
        "error": str(failure),
        "traceback": failure.traceback,
    }


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent, out of the way of what the function reads and prints."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return questions, answers


def _limit_memory(memory_mb: int | None) -> None:
    """Bounds what is taken beyond what Python and its libraries have taken until now."""
    if memory_mb is None:
        return
    statm = Path("/proc/self/statm")
    taken = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    limit = taken + memory_mb * (1 << 20)
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
