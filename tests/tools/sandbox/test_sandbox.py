"""What a sandbox does for honest programs: files in and out, limits, sessions, many at once, nothing left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import agentgym
from agentgym.errors import ConfigError, SandboxError, UnknownName
from agentgym.tools.sandbox import Ended, Sandbox, SandboxLimits, open_sandbox
from agentgym.tools.sandbox.exchange import send_request
from agentgym.tools.sandbox.request import ExecutionRequest

SERVED = ("namespaces", "landlock")
"""Boxes that a server process of ours forks."""
FORKS_THAT_WAIT = """
import os
data = b"x" * (60 << 20)
read, write = os.pipe()
children = []
for number in range(20):
    if (child := os.fork()) == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(sum(data[: 1000]) != 1000 * ord("x"))
    children.append(child)
os.close(write)
print([os.waitpid(child, 0)[1] for child in children])
"""
"""A program whose processes share their memory, which counts several times until the sum is exact."""


def server_of(sandbox: Sandbox) -> psutil.Process:
    return psutil.Process(sandbox._server._process.pid)  # type: ignore[attr-defined]


def scratch_of(sandbox: Sandbox) -> Path:
    """The folder that holds the files of all boxes; a backend without one has a path that does not exist."""
    return Path(sandbox._server._finish.peek()[2][2] or "/nonexistent")  # type: ignore[attr-defined]


def wait_for(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_program_ends_as_it_would_outside(sandbox: Sandbox) -> None:
    outcome = sandbox.run("import sys; print('é'); print('bad', file=sys.stderr); sys.exit(3)")
    assert (outcome.stdout, outcome.stderr, outcome.exit_code, outcome.ended) == ("é\n", "bad\n", 3, Ended.EXITED)
    assert not outcome.ok and outcome.backend == sandbox.backend
    assert sandbox.run("raise SystemExit('why')").stderr == "why\n"


def test_a_traceback_is_that_of_a_program_in_a_file(sandbox: Sandbox, tmp_path: Path) -> None:
    code = "def f():\n    return 1 / 0\n\nf()"
    (tmp_path / "main.py").write_text(code)
    outside = subprocess.run([sys.executable, tmp_path / "main.py"], capture_output=True, text=True)
    outcome = sandbox.run(code)
    assert (outcome.exit_code, outcome.stderr) == (1, outside.stderr.replace(f"{tmp_path}/", ""))


def test_threads_and_exit_handlers_are_waited_for(sandbox: Sandbox) -> None:
    code = """
import atexit, threading, time
atexit.register(print, 'at exit')
threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()
print('main')
"""
    assert sandbox.run(code).stdout == "main\nthread\nat exit\n"


def test_programs_have_the_standard_library_and_its_processes(sandbox: Sandbox) -> None:
    code = """
import asyncio, json, multiprocessing, re, sqlite3, subprocess, sys, tempfile
async def answer(): return 42
print(asyncio.run(answer()))
print(subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True, text=True).stdout.strip())
print(subprocess.check_output('echo shell | tr a-z A-Z', shell=True, text=True).strip())
with tempfile.NamedTemporaryFile('w') as file: print(file.write('abc'))
print(sqlite3.connect(':memory:').execute('select 1 + 1').fetchone())
child = multiprocessing.get_context('fork').Process(target=print, args=('child',))
child.start(); child.join()
"""
    outcome = sandbox.run(code)
    assert outcome.stdout.split("\n") == ["42", "7", "SHELL", "3", "(2,)", "child", ""], outcome


def test_copies_and_archives_are_made(sandbox: Sandbox) -> None:
    code = """
import shutil, tarfile
open('a', 'w').write('x')
shutil.copy('a', 'b'); shutil.copy2('a', 'c')
with tarfile.open('t.tar', 'w') as tar: tar.add('a'); tar.add('b')
with tarfile.open('t.tar') as tar: tar.extractall('out')
print(open('out/b').read() + open('c').read())
"""
    outcome = sandbox.run(code)
    assert (outcome.stdout, outcome.stderr) == ("xx\n", "")


def test_a_shell_script_is_run(sandbox: Sandbox) -> None:
    outcome = sandbox.run("for n in 1 2; do echo $n; done; ls; exit 4", language="shell", files={"a/b.txt": b"x"})
    assert (outcome.stdout, outcome.exit_code) == ("1\n2\na\n", 4)


def test_files_go_in_and_out(sandbox: Sandbox) -> None:
    code = """
from pathlib import Path
data = Path('in/data.bin').read_bytes()
Path('out').mkdir()
Path('out/a.txt').write_bytes(data[::-1]); Path('b.csv').write_text('1,2'); Path('c').write_text('')
"""
    outcome = sandbox.run(code, files={"in/data.bin": bytes(range(256))}, collect=["out/*", "*.csv", "missing"])
    assert dict(outcome.files) == {"out/a.txt": bytes(range(256))[::-1], "b.csv": b"1,2"}


def test_programs_do_not_see_each_other(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(4) as threads:
        code = "import os, sys, time; open(sys.argv[0] + 'x', 'w'); time.sleep(0.05); print(sorted(os.listdir('.')))"
        seen = {outcome.stdout for outcome in threads.map(lambda _: sandbox.run(code), range(8))}
    assert seen == {"['main.pyx']\n"}


def test_randomness_differs_between_programs(sandbox: Sandbox) -> None:
    assert len({sandbox.run("import random; print(random.random())").stdout for _ in range(3)}) == 3


def test_a_call_may_take_less_time_than_the_sandbox_gives_and_not_more(sandbox: Sandbox) -> None:
    outcome = sandbox.run("import time; print('begun', flush=True); time.sleep(60)", time_limit_s=0.5)
    assert (outcome.ended, outcome.exit_code, outcome.stdout) == (Ended.TIME_LIMIT, -9, "begun\n")
    assert 0.5 <= outcome.seconds < 5
    with pytest.raises(ConfigError, match="SandboxLimits\\(time_limit_s=60\\)"):
        sandbox.run("1", time_limit_s=60)


def test_output_ends_at_its_limit(sandbox: Sandbox) -> None:
    outcome = sandbox.run("print('x' * 40_000); import sys; print('y' * 40_000, file=sys.stderr)")
    assert outcome.ended is Ended.OUTPUT_LIMIT
    assert len(outcome.stdout) + len(outcome.stderr) == 64 * 1024
    assert sandbox.run("print('x' * 65_535)").ok


def test_packages_can_be_imported_and_not_changed(tmp_path: Path) -> None:
    for backend in SERVED:
        folder = tmp_path / backend
        folder.mkdir()
        (folder / "brought.py").write_text("VALUE = 6 * 7")
        with open_sandbox(backend, packages=[folder]) as sandbox:
            code = f"import brought; print(brought.VALUE); open({str(folder / 'new')!r}, 'w')"
            outcome = sandbox.run(code)
            assert outcome.stdout == "42\n" and "Error" in outcome.stderr
    with pytest.raises(ConfigError, match="none"):
        open_sandbox("landlock", packages=[tmp_path / "missing"])


# ---- sessions


def test_variables_live_from_cell_to_cell(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        assert session.run("def double(x): return 2 * x\nvalue = 21").ok
        assert session.run("double(value)").stdout == "42\n"
        assert session.run("import os; value += 1; open('kept.txt', 'w').write('here')").stdout == "4\n"
        assert session.run("cat kept.txt", language="shell").stdout == "here"
        assert session.run("value").stdout == "22\n"


def test_a_session_whose_client_leaves_without_the_answer_is_ended(served: Sandbox) -> None:
    served.run("print(1)")
    server, scratch = server_of(served), scratch_of(served)
    wait_for(lambda: len(server.children(recursive=True)) == 1)
    for _ in range(3):
        session = served.session()
        assert session.run("state = bytearray(1 << 20)").ok
        channel = session._channel  # type: ignore[attr-defined]
        request = ExecutionRequest(code=b"print(2)", language="python", files={}, collect=(), time_limit_s=5.0)
        send_request(channel, request, is_session=True)
        assert select.select([channel], [], [], 5.0)[0]
        session.close()
    wait_for(lambda: len(server.children(recursive=True)) == 1)
    wait_for(lambda: not scratch.exists() or not list(scratch.iterdir()))


def test_sessions_are_apart(sandbox: Sandbox) -> None:
    with sandbox.session() as first, sandbox.session() as second:
        first.run("secret = 1; open('file', 'w')")
        assert "NameError" in second.run("secret").stderr
        assert second.run("import os; os.listdir('.')").stdout == "[]\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("cell", "ended", "exit_code"),
    [
        ("values.append(2)\nwhile True: pass", Ended.TIME_LIMIT, -9),
        ("import os, time; values.append(2)\nif not os.fork(): time.sleep(60)\ntime.sleep(60)", Ended.TIME_LIMIT, -9),
        ("values.append(2)\nwhile True: print('x' * 1000)", Ended.OUTPUT_LIMIT, -9),
        ("import os; values.append(2); os._exit(5)", Ended.EXITED, 5),
        ("import ctypes; values.append(2); ctypes.string_at(0)", Ended.EXITED, -11),
    ],
    ids=["endless", "with a child", "endless output", "gone", "crashed"],
)
def test_a_cell_that_does_not_come_to_its_end_is_rolled_back(
    sandbox: Sandbox, cell: str, ended: Ended, exit_code: int
) -> None:
    with sandbox.session() as session:
        session.run("values = [1]")
        outcome = session.run(cell, time_limit_s=1.0 if ended is Ended.TIME_LIMIT else None)
        assert (outcome.ended, outcome.exit_code, outcome.rolled_back) == (ended, exit_code, True), outcome
        again = session.run("values")
        assert (again.stdout, again.rolled_back) == ("[1]\n", False)


def test_an_exception_leaves_what_was_done_before_it(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        outcome = session.run("a = 1\nb = 1 / 0")
        assert (outcome.exit_code, outcome.rolled_back) == (1, False)
        assert "<cell 1>" in outcome.stderr and "agentgym" not in outcome.stderr
        assert session.run("a").stdout == "1\n"
        assert session.run("raise SystemExit(4)").exit_code == 4
        assert session.run("a").stdout == "1\n"


def test_what_a_cell_started_ends_with_it(served: Sandbox) -> None:
    server = server_of(served)
    wait_for(lambda: len(server.children(recursive=True)) == 1)
    with served.session() as session:
        session.run("import subprocess; child = subprocess.Popen(['sleep', '60'])")
        assert session.run("child.poll() is not None or child.wait(5) is not None").stdout == "True\n"
        for _ in range(10):
            session.run("1")
        wait_for(lambda: len(server.children(recursive=True)) == 4)  # server, supervisor, first process, state
    wait_for(lambda: len(server.children(recursive=True)) == 1)


def test_a_program_that_kills_the_state_loses_its_session_and_nothing_else(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.run("x = 1")
    outcome = session.run("import os\nfor pid in (os.getppid(), os.getpid()): os.kill(pid, 9)")
    assert outcome.is_lost and not outcome.rolled_back
    with pytest.raises(SandboxError, match="over"):
        session.run("x")
    assert sandbox.run("print(1)").ok


# ---- many, for long, and the end


def test_shell_code_that_is_too_long_or_no_text_is_the_programs_own_fault(sandbox: Sandbox) -> None:
    long = f"echo {'x' * (1 << 17)}"
    message = f"sh: Argument list too long: {len(long)} bytes of code; write what is longer to a file in parts\n"
    with sandbox.session() as session:
        for run in (sandbox.run, session.run):
            outcome = run(long, language="shell")
            assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (126, "", message)
            assert run("printf '\ud800' | wc -c", language="shell").stdout.strip() == "3"


def test_files_that_a_box_cannot_hold_are_refused_before_it_is_opened(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match=rf"holds {sandbox.limits.scratch_mb} MiB: open it with a larger"):  # type: ignore[attr-defined]
        sandbox.run("1", files={"big": bytes(sandbox.limits.scratch_mb << 20), "one more": b"x"})  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="'a/b' is given as a file, and as a folder of another file"):
        sandbox.run("1", files={"a/b": b"", "a/b/c": b""})


@pytest.mark.long
def test_a_time_limit_that_passes_before_the_program_begins_ends_nothing_else(served: Sandbox) -> None:
    limits = [1e-4 * number for number in range(1, 41)]
    with ThreadPoolExecutor(3) as threads:
        beside = threads.submit(served.run, "import time; time.sleep(1); print('on')")
        ended = {
            outcome.ended for outcome in threads.map(lambda limit: served.run("print(1)", time_limit_s=limit), limits)
        }
    assert ended <= {Ended.TIME_LIMIT, Ended.EXITED} and Ended.TIME_LIMIT in ended
    assert beside.result().stdout == "on\n"


def test_a_program_that_stops_itself_waits_for_its_time_limit(served: Sandbox) -> None:
    stop = "import os, signal, time\n{}os.kill(os.getpid(), signal.SIGSTOP)\nprint('on')"
    outcome = served.run(stop.format(""), time_limit_s=1)
    assert (outcome.ended, outcome.stdout) == (Ended.TIME_LIMIT, "")
    child = "if os.fork() == 0:\n    time.sleep(0.3)\n    os.kill(os.getppid(), signal.SIGCONT)\n    os._exit(0)\n"
    outcome = served.run(stop.format(child))
    assert (outcome.ended, outcome.stdout) == (Ended.EXITED, "on\n")


def test_a_process_that_starts_while_the_others_are_paused_goes_on_with_them(served: Sandbox) -> None:
    for _ in range(4):
        outcome = served.run(FORKS_THAT_WAIT)
        assert (outcome.ended, outcome.stdout) == (Ended.EXITED, f"{[0] * 20}\n")


@pytest.mark.long
def test_two_hundred_programs_leave_no_process_no_file_and_no_open_file(served: Sandbox) -> None:
    served.run("print(1)")
    server, ours = server_of(served), psutil.Process()
    scratch = scratch_of(served)
    below = server.children(recursive=True)
    wait_for(lambda: len(server.children(recursive=True)) == 1)
    before = (ours.num_fds(), server.children()[0].num_fds(), len(ours.children()))
    del below
    with ThreadPoolExecutor(4) as threads:
        codes = ["print(1)", "import os; os.fork(); open('left', 'w')", "while True: pass", "1 / 0"]
        ended = [
            outcome.ended for outcome in threads.map(lambda n: served.run(codes[n % 4], time_limit_s=0.3), range(200))
        ]
    assert ended.count(Ended.TIME_LIMIT) >= 50
    wait_for(lambda: len(server.children(recursive=True)) == 1)
    assert (ours.num_fds(), server.children()[0].num_fds(), len(ours.children())) == before
    assert not scratch.exists() or not list(scratch.iterdir())


def test_closing_ends_programs_that_still_run(has_ended: Callable[[psutil.Process], bool]) -> None:
    for backend in SERVED:
        sandbox = open_sandbox(backend)
        session = sandbox.session()
        session.run("import os; os.fork()")
        below = [server_of(sandbox), *server_of(sandbox).children(recursive=True)]
        scratch = sandbox._server._finish.peek()[2][2]  # type: ignore[attr-defined]
        sandbox.close()
        session.close()
        assert len(below) >= 4 and all(has_ended(process) for process in below)
        assert not scratch or not os.path.exists(scratch)
        with pytest.raises(SandboxError, match="closed"):
            sandbox.run("1")


@pytest.mark.parametrize("backend", SERVED)
def test_boxes_end_with_the_process_that_opened_them_however_it_ends(
    backend: str, tmp_path: Path, has_ended: Callable[[psutil.Process], bool]
) -> None:
    code = f"""
import time
from agentgym.tools.sandbox import open_sandbox
sandbox = open_sandbox({backend!r})
session = sandbox.session()
session.run("import os, time; os.fork()")
print(sandbox._server._process.pid, flush=True)
sandbox.run("import os, time; os.fork(); time.sleep(9)")
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert owner.stdout
    server = psutil.Process(int(owner.stdout.readline()))
    wait_for(lambda: len(server.children(recursive=True)) >= 8)
    below = [server, *server.children(recursive=True)]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: all(has_ended(process) for process in below))
    wait_for(lambda: not list(tmp_path.iterdir()))


@pytest.mark.parametrize("backend", SERVED)
def test_a_fork_of_the_owner_that_ends_takes_nothing_with_it(backend: str) -> None:
    code = f"""
import os, sys
from agentgym.tools.sandbox import open_sandbox
sandbox = open_sandbox({backend!r})
if not os.fork(): sys.exit(0)
os.wait()
print(sandbox.run("print(42)").stdout)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "42\n\n", result


def test_a_server_that_was_killed_is_started_again() -> None:
    with open_sandbox() as sandbox:
        for process in (*server_of(sandbox).children(), server_of(sandbox)):
            process.kill()
        wait_for(lambda: sandbox._server._process.poll() is not None)  # type: ignore[attr-defined]
        assert sandbox.run("print(1)").ok


def test_a_server_that_ends_during_a_program_is_the_sandboxs_fault() -> None:
    with open_sandbox() as sandbox:
        server = server_of(sandbox)
        timer = threading.Thread(
            target=lambda: (wait_for(lambda: len(server.children(recursive=True)) >= 4), server.children()[0].kill())
        )
        timer.start()
        with pytest.raises(SandboxError, match="during an execution"):
            sandbox.run("import time; time.sleep(9)")
        timer.join()


# ---- what is asked for wrongly


def test_a_python_that_cannot_be_started_is_named_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/dev/null")
    with pytest.raises(SandboxError, match=r"its server cannot be started: .*/dev/null"):
        open_sandbox("landlock")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_run_is_refused_with_what_to_do(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match="language"):
        sandbox.run("1", language="perl")  # type: ignore[arg-type]
    for path in ("/etc/passwd", "../x", "a/../../x", ""):
        with pytest.raises(ConfigError, match="relative"):
            sandbox.run("1", files={path: b""})
    with pytest.raises(ConfigError, match="list of paths"):
        sandbox.run("1", collect="out.txt")
    with pytest.raises(UnknownName, match="did you mean 'landlock'"):
        open_sandbox("landlok")
    with pytest.raises(ConfigError, match="memory_mb"):
        SandboxLimits(memory_mb=8)
    with pytest.raises(ConfigError, match="time_limit_s"):
        SandboxLimits(time_limit_s=float("nan"))


@pytest.mark.parametrize("backend", SERVED)
def test_the_data_of_tasks_cannot_be_read_wherever_agentgym_is_installed(backend: str) -> None:
    package = Path(agentgym.__file__).parent
    data = package / "envs" / "data"
    assert (data / "wordle.txt").exists()
    code = f"""
import os
envs, data = {str(package / "envs")!r}, {str(data)!r}
print(len(open(f'{{envs}}/base/seeds.py').read()) > 0, 'wordle.py' in os.listdir(f'{{envs}}/games'))
for name in ('wordle.txt', 'humaneval/LICENSE'):
    try:
        open(f'{{data}}/{{name}}').read()
    except OSError as error:
        print(type(error).__name__)
os.rename(data, '/box/data')
"""
    with open_sandbox(backend, packages=[package.parent]) as opened:
        outcome = opened.run(code)
    kind = "FileNotFoundError" if backend == "namespaces" else "PermissionError"
    assert outcome.stdout == f"True True\n{kind}\n{kind}\n"
    assert outcome.exit_code == 1
