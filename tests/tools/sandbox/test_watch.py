"""What the supervisor of a box watches: memory, processes and cores; and whose fault a missing answer is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from agentgym.errors import SandboxError
from agentgym.tools.sandbox import Ended, Sandbox, SandboxLimits, open_sandbox
from agentgym.tools.sandbox.box.memory import MemoryWatch
from agentgym.tools.sandbox.box.processes import num_tasks
from agentgym.tools.sandbox.box.task_count import TaskCount, remove_task_counts

MIB = 1 << 20


@contextmanager
def sharers(memory: bytearray, number: int) -> Iterator[list[tuple[int, int, int]]]:
    """Forks that share `memory`: each writes a page of it for each byte that it gets, and answers with a byte."""
    processes = []
    try:
        for _ in range(number):
            orders, order = os.pipe()
            answers, answer = os.pipe()
            pid = os.fork()
            if pid == 0:
                while count := len(os.read(orders, 1 << 15)):
                    for page in range(count):
                        memory[page * 4096] = 1
                    os.write(answer, b"x")
                os._exit(0)
            os.close(orders)
            os.close(answer)
            processes.append((pid, order, answers))
        yield processes
    finally:
        for pid, order, answers in processes:
            os.close(order)
            os.close(answers)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_memory_that_processes_share_counts_once_until_they_write_to_it() -> None:
    memory = bytearray(b"x") * (40 * MIB)
    paused: list[str] = []
    with sharers(memory, 4) as processes:
        pids = [pid for pid, _, _ in processes]
        # What they share beside the 40 MiB is the memory of this process, of any size.
        watch = MemoryWatch(60 * MIB + sum(psutil.Process(pid).memory_full_info().pss for pid in pids))

        def is_passed() -> bool:
            return watch.is_passed(pids, lambda: paused.append("pause"))

        assert sum(psutil.Process(pid).memory_info().rss for pid in pids) > 160 * MIB
        assert not is_passed()
        counted = list(paused)
        assert not is_passed() and paused == counted  # nothing was added: the sum holds
        for _, order, answers in processes:
            os.write(order, b"x" * (40 * MIB // 4096))
            os.read(answers, 1)
        assert is_passed() and len(paused) > len(counted)


THREADS = """
import sys, threading
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
sys.stdin.read()
"""


def test_threads_count_and_so_does_a_process_that_nobody_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stdout.readline()
        assert num_tasks([process.pid]) == 4
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert num_tasks([process.pid]) == 1


COMPUTES = """
import os, time
children = []
for _ in range(7):
    children.append(os.fork())
    if not children[-1]:
        end = time.time() + 0.8
        while time.time() < end: pass
        os._exit(os.getpriority(os.PRIO_PROCESS, 0))
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.mark.long
def test_a_box_in_which_many_processes_compute_makes_way_for_others(served: Sandbox) -> None:
    with served.session() as session:
        nice = eval(session.run(COMPUTES).stdout)
        assert max(nice) >= 4
        assert session.run("os.getpriority(os.PRIO_PROCESS, 0)").stdout == f"{os.getpriority(os.PRIO_PROCESS, 0)}\n"


FIRST_THREAD_ENDS = """
import ctypes, os, platform, threading, time
number = {"x86_64": 60, "aarch64": 93}[platform.machine()]
if not os.fork():
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).syscall(ctypes.c_long(number), 0)
time.sleep(0.2)
"""


def test_a_process_whose_first_thread_has_ended_ends_with_its_cell(served: Sandbox) -> None:
    server = psutil.Process(served._server._process.pid)  # type: ignore[attr-defined]
    with served.session() as session:
        assert session.run(FIRST_THREAD_ENDS).ok
        deadline = time.monotonic() + 10  # a killed process is gone a moment later; the other thread sleeps for long
        while {num_tasks([process.pid]) for process in server.children(recursive=True)} != {1}:
            assert time.monotonic() < deadline
            time.sleep(0.02)


PARENT_ENDS_DURING_A_WALK = """
import os, signal, time
from agentgym.tools.sandbox.box import kernel, processes
kernel.become_subreaper()
reading, writing = os.pipe()
parent = os.fork()
if not parent:
    child = os.fork()
    if child:
        os.write(writing, str(child).encode())
    time.sleep(60)
child = int(os.read(reading, 64))
def others(walks=[]):
    walks.append(1)
    if len(walks) > 1:
        return processes.descendants(os.getpid())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    return [parent]
assert processes.kill_until_gone(others)
print(processes._is_alive(child))
"""


def test_a_process_whose_parent_ends_while_the_tree_is_read_is_killed_too() -> None:
    run = subprocess.run([sys.executable, "-c", PARENT_ENDS_DURING_A_WALK], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run.stderr


@pytest.mark.long
def test_a_box_that_gives_no_answer_while_others_do_ran_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_sandbox("namespaces", limits=SandboxLimits(time_limit_s=1.0)) as sandbox:
        session = sandbox.session()
        assert session.run("x = 1").ok
        server = psutil.Process(sandbox._server._process.pid).children()[0]  # type: ignore[attr-defined]
        supervisor = server.children()[0]
        supervisor.suspend()
        monkeypatch.setattr("agentgym.tools.sandbox.served.ANSWER_S", 0.5)
        outcome = session.run("x")
        assert outcome.ended is Ended.TIME_LIMIT and outcome.is_lost
        supervisor.kill()


def test_a_server_that_answers_nobody_is_the_sandboxs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_sandbox("namespaces", limits=SandboxLimits(time_limit_s=0.3)) as sandbox:
        monkeypatch.setattr("agentgym.tools.sandbox.served.ANSWER_S", 0.2)
        monkeypatch.setattr("agentgym.tools.sandbox.served.PROBE_S", 0.3)
        server = psutil.Process(sandbox._server._process.pid).children()[0]  # type: ignore[attr-defined]
        server.suspend()
        with pytest.raises(SandboxError, match="does not answer"):
            sandbox.run("1")
        server.resume()


FORKS = """
import os, time
n = 0
try:
    while os.fork(): n += 1
    time.sleep(9)
except OSError:
    print(n)
"""


@pytest.fixture
def task_count() -> Iterator[TaskCount]:
    count = TaskCount(10)
    if not count.folder:
        pytest.skip("this user can make no cgroup here")
    yield count
    count.close()


def test_the_kernel_counts_the_tasks_of_a_landlock_box_where_it_can_have_a_cgroup(task_count: TaskCount) -> None:
    with open_sandbox("landlock", limits=SandboxLimits(num_processes=10)) as sandbox:
        outcome = sandbox.run(FORKS)
        (server,) = psutil.Process(sandbox._server._process.pid).children()  # type: ignore[attr-defined]
    assert outcome.ok and outcome.stdout == "9\n", outcome
    assert not list(Path(task_count.folder).parent.glob(f"agentgym-box-{server.pid}-*"))


def test_the_cgroups_of_killed_supervisors_are_removed(task_count: TaskCount) -> None:
    remove_task_counts(os.getppid() + 1)
    assert Path(task_count.folder).exists()
    remove_task_counts(os.getppid())
    assert not Path(task_count.folder).exists()
