"""An environment that holds the interpreter is named, with its seed and stack, and the run is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentgym.evaluation.play import evaluate
from agentgym.evaluation.play.config import EvalConfig
from agentgym.evaluation.play.evaluate import open_evaluation
from agentgym.rollout.hosting import watchdog
from agentgym.rollout.hosting.watchdog import named_call, watch_calls
from agentgym.rollout.hosting.watchdog_process import stack_of
from agentgym.tools.calling.worker import Worker

ENVS = '''
import re
import time

from agentgym.envs import TextEnv


class Spin(TextEnv):
    """A regex that backtracks for ever, which holds the interpreter."""

    max_turns = 3
    runs_inline = False

    def reset(self, *, seed=None, options=None):
        return "Say something.", {}

    def step(self, action):
        return self.look_for_a()

    def look_for_a(self):
        open("begun", "w").close()
        re.match("(a+)+$", "a" * 40 + "b")
        return "Done.", 1.0, True, False, {}


class Inline(Spin):
    runs_inline = True


class Asynchronous(Spin):
    async def areset(self, *, seed=None, options=None):
        return "Say something.", {}

    async def astep(self, action):
        return self.look_for_a()
'''


def spawn(folder: Path, env: str, *words: str) -> subprocess.Popen[str]:
    (folder / "bad.py").write_text(ENVS)
    command = [sys.executable, "-m", "agentgym", "eval", "--env", f"bad.py:{env}", "--policy", "random", "-n", "3"]
    return subprocess.Popen(
        [*command, *words, "--output", "run"], cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


SLOW = [pytest.param(env, marks=pytest.mark.slow) for env in ("Inline", "Asynchronous")]


@pytest.mark.long
@pytest.mark.parametrize("env", ["Spin", *SLOW])
def test_an_environment_that_holds_the_interpreter_is_reported_with_its_stack(env: str, tmp_path: Path) -> None:
    process = spawn(tmp_path, env, "--stall-s", "2")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert f"{env} (seed 10000000" in errors and "step(" in errors
    assert 'bad.py", line ' in errors and "in look_for_a" in errors
    assert len(errors.splitlines()) < 80


@pytest.mark.slow
def test_ctrl_c_ends_a_run_whose_environment_holds_the_interpreter(tmp_path: Path) -> None:
    process = spawn(tmp_path, "Spin")
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    with process:
        try:
            _, errors = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL and "Spin (seed" in errors


@pytest.mark.long
def test_ctrl_c_while_the_watchdog_begins_does_not_end_it() -> None:
    others = set(psutil.Process().children())
    for number in (signal.SIGINT, signal.SIGTERM):
        with watch_calls(60.0):
            (child,) = set(psutil.Process().children()) - others
            child.send_signal(number)
            with pytest.raises(psutil.TimeoutExpired):
                child.wait(1.0)
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_stacks_are_told_by_the_number_of_the_thread() -> None:
    dump = (
        "Thread 0x00007f01 (most recent call first):\n  File one\n\n"
        "Current thread 0x00007f02 (most recent call first):\n  File two\n  File three\n"
    )
    assert stack_of(dump, 0x7F01) == "  File one"
    assert stack_of(dump, 0x7F02) == "  File two\n  File three"
    assert stack_of(dump, 0x7F03) == dump.strip()


@pytest.mark.long
def test_a_long_call_that_releases_the_interpreter_is_left_alone_and_nothing_stays() -> None:
    before = len(os.listdir("/proc/self/fd"))
    others = set(psutil.Process().children())
    with watch_calls(1.0):
        (child,) = set(psutil.Process().children()) - others
        named_call(lambda: "sleeps", lambda: time.sleep(3))()
        assert child.is_running()
    assert not child.is_running()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_tool_on_another_thread_is_known_by_the_call_of_its_environment() -> None:
    def labels() -> list[tuple[int, bytes]]:
        assert watchdog._active is not None
        slots = watchdog.SLOT.iter_unpack(watchdog._active._board[:])
        return [(ident, label.rstrip(b"\0")) for tid, ident, label in slots if label.rstrip(b"\0")]

    with watch_calls(60.0):
        worker = Worker("tools")
        calls = named_call(lambda: "Lock (seed 1), step", lambda: worker.submit(labels).result())()
        assert not labels()
        worker.stop()
    assert {label for _, label in calls} == {b"Lock (seed 1), step"} and len({ident for ident, _ in calls}) == 2


def test_without_a_watchdog_a_call_is_what_it_was() -> None:
    def call() -> int:
        return 3

    assert named_call(lambda: "", call) is call
    with watch_calls(None):
        assert named_call(lambda: "", call) is call


@pytest.mark.parametrize(("num_processes", "limit_s"), [(0, 7.0), (2, None)])
def test_a_run_whose_environments_have_processes_needs_no_watchdog_of_its_own(
    num_processes: int, limit_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(Exception):
        """Ends the run when it would begin."""

    def watch(limit_s: float | None) -> None:
        raise Watched(limit_s)

    monkeypatch.setattr(evaluate, "watch_calls", watch)
    config = EvalConfig(env="TextGame-v0", policy="embedded", num_tasks=1, stall_s=7.0, env_processes=num_processes)
    with pytest.raises(Watched) as watched:
        open_evaluation(config, tmp_path / "run").run()
    assert watched.value.args == (limit_s,)
