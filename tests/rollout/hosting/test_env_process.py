"""Environments in other processes: whoever breaks one ends alone, and nothing else differs."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.errors import ConfigError, UnknownName
from agentgym.evaluation import EvalConfig
from agentgym.rollout import Episode, Limits, RolloutLoop, Sampler, SamplerConfig, trajectory_to_json
from agentgym.rollout.episode.episode_loop import FAULT_TOOL
from agentgym.rollout.hosting.env_host import make_task_env
from agentgym.rollout.sampling.self_play import SelfPlaySampler
from agentgym.trajectory import Status, Trajectory
from agentgym.types import Task

Raw = Callable[[str], list[int]]
CALL = '<tool_call>\n{{"name": "go", "arguments": {{"direction": "{}"}}}}\n</tool_call><|im_end|>'
ENVS = '''
import os
import signal
import threading
import time

from agentgym.envs import TextEnv, ToolEnv
from agentgym.tools import tool


class Own:
    """Of a class that only this file has."""


class Refusal(Exception):
    def __reduce__(self):
        raise TypeError("this one does not pickle")


class Fault(ToolEnv):
    """Does what its keyword says at the second call; the others go on for three turns."""

    own_split = True
    max_turns = 3

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault

    def start(self, options):
        print("reset", self.np_random_seed, flush=True)
        return f"Task {self.np_random_seed}."

    @tool
    def go(self, direction: str) -> str:
        """Goes there.

        Args:
            direction: where
        """
        if self.turns == 2:
            match self.fault:
                case "exits":
                    os._exit(3)
                case "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "sleeps":
                    time.sleep(60)
                case "raises":
                    raise Refusal("no disk")
        return "gone"


class Objects(TextEnv):
    """Gives what no other process can have."""

    max_turns = 2

    def reset(self, *, seed=None, options=None):
        return "Go.", {}

    def step(self, action):
        return "gone", 1.0, False, False, {"own": Own(), "lock": threading.Lock(), "note": "kept"}
'''


@pytest.fixture
def envs(tmp_path: Path) -> str:
    (tmp_path / "faults.py").write_text(ENVS)
    return f"{tmp_path / 'faults.py'}"


@pytest.fixture
def loop(renderer: Renderer, raw: Raw) -> RolloutLoop:
    """Goes somewhere, which follows from a request's seed."""

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        return raw(CALL.format(("north", "east", "south", "west")[sampling.seed % 4]))

    limits = Limits(env_step_s=2.0, close_s=1.0)
    return RolloutLoop(ScriptedEngine(reply, vocab_size=renderer.vocab_size), renderer, limits)


def play(loop: RolloutLoop, tasks: Mapping[str, Task], env_processes: int) -> dict[str, Trajectory]:
    """The episodes of the tasks, by the names of their groups; leaves no process."""

    async def run() -> list[Trajectory]:
        sampler = Sampler(loop, config=SamplerConfig(env_processes=env_processes, max_failure_rate=1.0))
        try:
            return await sampler.run([Episode(task, group) for group, task in tasks.items()])
        finally:
            sampler.close()

    before = set(psutil.Process().children())
    played = asyncio.run(run())
    assert set(psutil.Process().children()) == before
    return dict(zip(tasks, played, strict=True))


def lines(played: Mapping[str, Trajectory], names: Iterable[str]) -> list[str]:
    return [json.dumps(trajectory_to_json(played[name])) for name in names]


@pytest.mark.long
def test_equal_seeds_give_equal_episodes_wherever_their_environments_are(
    loop: RolloutLoop, envs: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = {f"game {seed}": Task("TextGame-v0", seed) for seed in range(6)}
    tasks |= {"raises": Task(f"{envs}:Fault", 7, kwargs={"fault": "raises"}), "objects": Task(f"{envs}:Objects", 8)}
    here = play(loop, tasks, 0)
    assert lines(play(loop, tasks, 2), tasks) == lines(here, tasks)
    assert "Refusal: no disk" in str(here["raises"].info["traceback"])
    assert here["objects"].reward == 2.0 and here["objects"].info["note"] == "kept"
    assert capfd.readouterr().out.count("reset 7\n") == 2  # what they print goes where it always goes


@pytest.mark.long
def test_who_ends_its_process_fails_alone_and_others_play_on(loop: RolloutLoop, envs: str) -> None:
    healthy = {f"{seed}": Task(f"{envs}:Fault", seed) for seed in range(2)}
    faulty = {fault: Task(f"{envs}:Fault", 9, kwargs={"fault": fault}) for fault in ("exits", "is killed")}
    played = play(loop, {**faulty, **healthy}, 2)
    assert lines(played, healthy) == lines(play(loop, healthy, 0), healthy)
    exited, killed = (played[fault] for fault in faulty)
    assert exited.reward is killed.reward is None
    assert exited.status is killed.status is Status.ENV_ERROR
    assert f"the environment's process ended with exit code 3: {envs}:Fault (seed 9), tool go, step(" in str(
        exited.error
    )
    assert "was killed by SIGKILL (the system does that when memory is short): " in str(killed.error)
    assert exited.info[FAULT_TOOL] == "go" and len(exited.turns) == 2


def test_a_task_that_a_process_cannot_play_is_the_callers_mistake(loop: RolloutLoop) -> None:
    def refused(task: Task) -> str:
        with pytest.raises((ConfigError, UnknownName)) as refusal:
            play(loop, {"0": task}, 1)
        return str(refusal.value)

    unsent = Task("TextGame-v0", 1, kwargs={"level": threading.Lock()})  # type: ignore[dict-item]
    assert "name its file, 'path/to/file.py:Lock'" in refused(Task("__main__:Lock", 1))
    assert "TextGame-v0 hold what a process of environments (env_processes) cannot be sent" in refused(unsent)
    unknown = refused(Task("TextGme-v0", 1))
    assert "did you mean 'TextGame-v0'" in unknown and "in a process of environments" in unknown


def test_a_process_that_does_not_start_ends_the_run(loop: RolloutLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="did not start: it ended with exit code 1"):
        play(loop, {"0": Task("TextGame-v0", 1)}, 1)


def test_a_sampler_that_is_not_closed_leaves_no_process(loop: RolloutLoop) -> None:
    before = set(psutil.Process().children())
    sampler = Sampler(loop, config=SamplerConfig(env_processes=1))
    asyncio.run(sampler.run([Episode(Task("TextGame-v0", 1))]))
    assert len(set(psutil.Process().children()) - before) == 1
    del sampler
    gc.collect()
    assert set(psutil.Process().children()) == before


def test_what_needs_the_environment_at_hand_is_refused(loop: RolloutLoop) -> None:
    with pytest.raises(ConfigError, match="the policy oracle looks into the environment"):
        EvalConfig(env="TextGame-v0", policy="oracle", env_processes=1)
    with pytest.raises(ConfigError, match="leave it out, or `make`"):
        Sampler(loop, lambda task: make_task_env(task), SamplerConfig(env_processes=1))
    with pytest.raises(ConfigError, match="the seats of a game share its environment"):
        SelfPlaySampler(loop, config=SamplerConfig(env_processes=1))
    with pytest.raises(ConfigError, match="leave env_threads or env_processes out"):
        SamplerConfig(env_processes=1, env_threads=2)


RUN = """
import asyncio, sys, time
from agentgym.rollout.hosting.env_process import EnvProcesses
from agentgym.rollout.limits import Limits
from agentgym.types import Task

async def run():
    env = await EnvProcesses(1, Limits(close_s=1.0)).open(Task(sys.argv[1], 1, kwargs={"fault": "sleeps"}))
    print("open", flush=True)
    time.sleep(600)

asyncio.run(run())
"""


@pytest.mark.slow
def test_processes_end_with_a_run_that_is_killed(envs: str) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, f"{envs}:Fault"], stdout=subprocess.PIPE)
    assert run.stdout is not None
    with run.stdout as output:
        assert output.readline() == b"open\n"
        children = psutil.Process(run.pid).children(recursive=True)
        run.kill()
        run.wait()
    assert len(children) == 2 and not psutil.wait_procs(children, timeout=30)[1]  # the process and its watchdog
