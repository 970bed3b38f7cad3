"""Checks that an episode depends only on its seed, and leaves no resources open."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agentgym.envs.base.action import Action
from agentgym.envs.base.policies import RandomPolicy
from agentgym.testing.contracts.env_subject import (
    MAX_STEPS,
    Check,
    Complaint,
    EnvUnderTest,
    difference,
    line,
    transcript,
)

__all__ = ["ISOLATION"]

SIDE_BY_SIDE = 32
OTHER_PROCESS_S = 300.0
SHORT_STEPS = 8
GRACE_S = 2.0
"""The seconds that threads and processes may take to end after `close`."""
FORK_AFTER = 2
ABANDONED_AFTER = 2
OTHER_PROCESS = """
import json, sys
sys.path.insert(0, "")
from agentgym.envs import resolve_env
from agentgym.testing.contracts.env_subject import transcript
name, kwargs, seed = json.loads(sys.argv[1])
env = resolve_env(name, kwargs)()
sys.stdout.write("\\n<transcript>" + json.dumps(transcript(env, seed)))
env.close()
"""


def _global_state(make: EnvUnderTest) -> Iterator[Complaint]:
    random_state, kept_numpy = random.getstate(), np.random.get_state()
    try:
        plays = []
        for number in (1, 2):
            random.seed(number)
            np.random.seed(number)
            before, before_numpy = random.getstate(), np.random.get_state()
            env = make()
            plays.append(transcript(env, 0))
            env.close()
            if random.getstate() != before or str(np.random.get_state()) != str(before_numpy):
                yield "error", "it draws from or seeds the global random state; draw from self.np_random alone"
                return
    finally:
        random.setstate(random_state)
        np.random.set_state(kept_numpy)
    if plays[0] != plays[1]:
        yield ("error", f"the global random state changes the episode: {difference(*plays)}; draw from self.np_random")


def _another_process(make: EnvUnderTest) -> Iterator[Complaint]:
    if not make.env_id:
        yield "not claimed", "it was given as an object: by its id or place another process plays it too"
        return
    env = make()
    here = transcript(env, 0)
    env.close()
    command = [sys.executable, "-c", OTHER_PROCESS, json.dumps([make.env_id, dict(make.kwargs), 0])]
    hashed = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=hashed, timeout=OTHER_PROCESS_S)
    begin = done.stdout.rfind("<transcript>")
    if done.returncode or begin < 0:
        yield "error", f"another process cannot play it: {done.stderr.strip()[-300:]}"
        return
    there = json.loads(done.stdout[begin + len("<transcript>") :])
    if there != here:
        yield "error", f"another process plays another episode: {difference(here, there)}; sort what a set gives"


def _side_by_side(make: EnvUnderTest) -> Iterator[Complaint]:
    alone = [_play_transcript(make, seed) for seed in range(SIDE_BY_SIDE)]
    together = threading.Barrier(SIDE_BY_SIDE)  # all have started before any goes on
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        played = [pool.submit(_play_transcript, make, seed, together) for seed in range(SIDE_BY_SIDE)]
    errors = [error for future in played if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    beside = [future.result() for future in played]
    wrong = [seed for seed in range(SIDE_BY_SIDE) if alone[seed] != beside[seed]]
    if wrong:
        where = difference(alone[wrong[0]], beside[wrong[0]])
        yield (
            "error",
            f"{len(wrong)} of {SIDE_BY_SIDE} episodes in threads are others than alone, seed {wrong[0]} at {where}; "
            "keep state on self, and not on the class or module",
        )


def _play_transcript(make: EnvUnderTest, seed: int, together: threading.Barrier | None = None) -> list[str]:
    env = make()
    try:
        return transcript(env, seed, steps=SHORT_STEPS, begun=None if together is None else together.wait)
    except BaseException:
        if together is not None:
            together.abort()  # the others must not wait for this one
        raise
    finally:
        env.close()


def _identical_starts(make: EnvUnderTest) -> Iterator[Complaint]:
    """Checks that members of a group begin alike, whatever their environments played before."""
    starts = []
    used = make()
    for before in (None, 1, 2):
        env = make() if before is None else used
        if before is not None:
            transcript(env, before, steps=SHORT_STEPS)
        observation, info = env.reset(seed=0)
        tools = [(spec.name, spec.description, spec.parameters) for spec in env.tool_specs]
        starts.append([line(env.system_prompt), line(tools), line(observation, info)])
        if env is not used:
            env.close()
    used.close()
    for other in starts[1:]:
        if other != starts[0]:
            parts = zip(("system prompt", "tools", "first observation"), starts[0], other, strict=True)
            what, left, right = next(part for part in parts if part[1] != part[2])
            yield (
                "error",
                f"one seed begins with another {what} after other episodes: {difference([left], [right])}; "
                "set everything again in start or reset",
            )
            return


def _fork(make: EnvUnderTest) -> Iterator[Complaint]:
    env = make()
    if not callable(getattr(env, "fork", None)):
        yield "not claimed", "it has no method fork()"
        env.close()
        return
    actions, rest = _actions(make)
    env.reset(seed=0)
    for action in actions:
        env.step(action)
    forks: list[Any] = [env.fork(), env.fork()]  # type: ignore[attr-defined]
    if env in forks or forks[0] is forks[1]:
        yield "error", "fork() gives no new environment; copy the episode's state into another one"
        return
    transcripts = [[line(*branch.step(action)) for action in rest] for branch in (forks[0], env, forks[1])]
    for branch in (*forks, env):
        branch.close()
    for other in transcripts[1:]:
        if other != transcripts[0]:
            yield "error", f"a fork plays otherwise than what it was forked from: {difference(transcripts[0], other)}"
            return


def _actions(make: EnvUnderTest) -> tuple[list[Action], list[Action]]:
    """Returns the replies of a random episode, before and after the fork."""
    env = make()
    observation, _ = env.reset(seed=0)
    policy = RandomPolicy()
    policy.reset(env, observation, 0)
    actions: list[Action] = []
    for _ in range(MAX_STEPS):
        actions.append(Action.from_message(policy.act(observation)))
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        if terminated or truncated:
            break
    env.close()
    cut = min(FORK_AFTER, len(actions) - 1)
    return actions[:cut], actions[cut:]


@dataclass(frozen=True)
class _Held:
    """The resources that a process holds: `_Held.now(folder).beyond(before)` names those that are new."""

    files: int
    threads: frozenset[str]
    processes: frozenset[str]
    left: frozenset[str]

    @classmethod
    def now(cls, folder: str) -> _Held:
        process = psutil.Process()
        children = []
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                children.append(f"{child.name()} ({child.pid})")
        threads = frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate())
        left = frozenset(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
        return cls(process.num_fds(), threads, frozenset(children), left)

    def beyond(self, before: _Held) -> list[str]:
        """Returns the resources that were not held before, in words."""
        leftovers = []
        if self.files > before.files:
            leftovers.append(f"{self.files - before.files} open files")
        pairs = (("threads", "threads"), ("processes", "processes"), ("left", "temporary files"))
        for attribute, name in pairs:
            extra = sorted(getattr(self, attribute) - getattr(before, attribute))
            if extra:
                leftovers.append(f"{len(extra)} {name}: {', '.join(extra[:3])}")
        return leftovers


def _releases(make: EnvUnderTest) -> Iterator[Complaint]:
    folder_before = tempfile.tempdir
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            _play_and_close(make)  # what the first episode of a process loads once is no leak
            before = _Held.now(folder)
            _play_and_close(make)
            deadline = time.monotonic() + GRACE_S
            while (extra := _Held.now(folder).beyond(before)) and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            tempfile.tempdir = folder_before
    if extra:
        yield (
            "error",
            f"after close it still holds {'; '.join(extra)} (two episodes, one of them left half-played); "
            "give back in release or close",
        )


def _play_and_close(make: EnvUnderTest) -> None:
    for steps in (ABANDONED_AFTER, MAX_STEPS):
        env = make()
        transcript(env, 0, steps=steps)
        env.close()


ISOLATION: dict[str, Check] = {
    "global random state": _global_state,
    "another process": _another_process,
    "side by side": _side_by_side,
    "identical starts": _identical_starts,
    "fork": _fork,
    "close releases": _releases,
}
