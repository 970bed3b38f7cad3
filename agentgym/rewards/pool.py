"""Reward functions in separate processes: a hang is killed, and too much memory harms no other process."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentgym.errors import NOT_JSON, ConfigError, UnknownName
from agentgym.rewards.reward import RewardFailure, UnusableReward
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.trajectory import Trajectory

__all__ = ["PoolJob", "RewardPool"]

START_S = 120.0
"""The seconds that a process may take to start and to load its function."""
MAX_ANSWER = 1 << 26
LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolJob:
    """The job of the pool's processes: a function with its settings and limits."""

    function: str
    """A name in REWARDS, `package.module:name` or `path/to/file.py:name`; it is loaded only in the processes."""
    settings: Mapping[str, object]
    timeout_s: float
    memory_mb: int | None


class RewardPool:
    """A pool of `num_processes` processes that score, started when they are needed.

    Episodes are sent as pickles, rewards come back as JSON: no output of a process is executed here. A process has the
    user's rights and files, so this contains accidents, and is not a sandbox.
    """

    takes_environment = False

    def __init__(self, job: PoolJob, num_processes: int) -> None:
        self.job = job
        self._num_processes = num_processes
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._together = False

    @property
    def together(self) -> bool:
        return self._together

    @property
    def num_at_once(self) -> int:
        return 1 if self._together else self._num_processes

    async def open(self) -> None:
        """Starts a process to check that the function loads; raises UnknownName or ConfigError if it does not."""
        process = _Process(self.job)
        try:
            self._together = await process.start()
        except BaseException as error:
            await process.kill()
            if isinstance(error, RewardFailure):
                raise ConfigError(f"no process for rewards starts: {error}") from None
            raise
        self._idle.append(process)

    async def score(self, trajectories: Sequence[Trajectory], env: HostedEnv | None = None) -> Sequence[object]:
        process = self._idle.pop() if self._idle else _Process(self.job)
        self._busy.add(process)
        healthy = False
        try:
            if not process.is_started:
                await process.start()
            values = await process.score(trajectories)
            healthy = True
            return values
        except _Raised as raised:
            healthy = not raised.out_of_memory
            raise RewardFailure(str(raised), raised.traceback) from None
        finally:
            self._busy.discard(process)
            if healthy:
                self._idle.append(process)
            else:
                await process.kill()

    async def close(self) -> None:
        processes, self._idle = [*self._idle, *self._busy], []
        for process in processes:
            await process.kill()


class _Raised(RewardFailure):
    """The function raised, and its process continues."""

    out_of_memory = False


class _Process:
    """One process and its two pipes."""

    def __init__(self, job: PoolJob) -> None:
        self.job = job
        self._child: asyncio.subprocess.Process | None = None

    @property
    def is_started(self) -> bool:
        return self._child is not None

    async def start(self) -> bool:
        """Starts the process; returns true if its function scores several episodes in a call."""
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "agentgym.rewards.pool_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        answer = await self._ask(self.job, START_S)
        for error_kind in (UnknownName, ConfigError):
            if answer.get("kind") == error_kind.__name__:
                raise error_kind(answer["words"])
        if "error" in answer:
            raise ConfigError(f"reward {self.job.function!r} does not load: {answer['error']}\n{answer['traceback']}")
        return bool(answer["together"])

    async def score(self, trajectories: Sequence[Trajectory]) -> list[object]:
        """Returns a value per trajectory; raises _Raised if the function did, RewardFailure if the process is lost."""
        answer = await self._ask(list(trajectories), self.job.timeout_s)
        if answer.get("kind") == UnusableReward.__name__:
            raise UnusableReward(answer["words"])
        if "error" in answer:
            raised = _Raised(answer["error"], answer["traceback"])
            raised.out_of_memory = answer["kind"] == "MemoryError"
            raise raised
        values = answer.get("values")
        if not isinstance(values, list) or len(values) != len(trajectories):
            raise RewardFailure(f"the process of {self.job.function!r} answered what is not a list of rewards")
        return [_read_failure(value) if isinstance(value, dict) and "refused" in value else value for value in values]

    async def _ask(self, question: object, timeout_s: float) -> dict[str, Any]:
        child, name = self._child, self.job.function
        assert child is not None and child.stdin is not None and child.stdout is not None
        data = pickle.dumps(question)
        try:
            async with asyncio.timeout(timeout_s):
                child.stdin.write(LENGTH.pack(len(data)) + data)
                await child.stdin.drain()
                (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
                if length > MAX_ANSWER:
                    raise RewardFailure(f"the process of {name!r} answered with {length} bytes")
                answer = json.loads(await child.stdout.readexactly(length))
        except TimeoutError:
            raise RewardFailure(
                f"the process of {name!r} gave no answer within {timeout_s:g} s (reward.timeout_s) and was killed"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.kill()
            raise RewardFailure(f"the process of {name!r} ended {self._how()}; another one takes its place") from None
        except NOT_JSON as error:
            raise RewardFailure(f"the process of {name!r} answered what is not JSON: {error}") from None
        if not isinstance(answer, dict):
            raise RewardFailure(f"the process of {name!r} answered what is not an object")
        return answer

    def _how(self) -> str:
        code = self._child.returncode if self._child is not None else None
        by_signal = code is not None and code < 0
        return f"by {signal.Signals(-code).name}" if by_signal and code is not None else f"with exit code {code}"

    async def kill(self) -> None:
        """Ends the process and all that it started; a second call does nothing."""
        child = self._child
        if child is None:
            return
        if child.stdin is not None:
            child.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


def _read_failure(answer: Mapping[str, Any]) -> RewardFailure:
    refusal = answer["refused"]
    return RewardFailure(refusal["error"], refusal["traceback"])
