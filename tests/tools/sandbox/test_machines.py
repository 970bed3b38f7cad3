"""Which boxes a machine holds: both here, older versions of Landlock, and neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.tools.sandbox import sandbox_faults


def test_this_machine_holds_both_boxes() -> None:
    faults = sandbox_faults()
    assert (faults["namespaces"], faults["landlock"]) == (None, None)


OLD_LANDLOCK = """
import os, signal
from agentgym.tools.sandbox.box.kernel import forbid_new_privileges
from agentgym.tools.sandbox.box.landlock import restrict_files
from agentgym.tools.sandbox.box.seccomp import assemble, install_filter
def attempt(function, *arguments):
    try: print('DONE', function(*arguments))
    except OSError as error: print(type(error).__name__)
os.chdir({scratch!r})
read = ["/usr", "/lib", "/lib64", {prefix!r}]
child = os.fork()
if child == 0:
    os.close(1)  # nobody waits for it where its parent ends before its time
    signal.pause()
forbid_new_privileges()
restrict_files({version}, listed=[], readable=read, devices=["/dev/null"], write=[{scratch!r}])
install_filter(assemble(os.uname().machine, owns_files=False, leaves_group=False, signals=False))
attempt(lambda: open("mine", "w").close())
attempt(open, {secret!r})
attempt(os.truncate, {secret!r}, 0)
attempt(os.kill, child, 9)
attempt(os.kill, os.getpid(), 0)
print(flush=True)
os.abort()
"""


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_older_versions_of_landlock_contain_with_the_filters_help(version: int, tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    code = OLD_LANDLOCK.format(
        scratch=str(tmp_path / "box"), prefix=sys.base_prefix, secret=str(secret), version=version
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout
        lines = [process.stdout.readline().strip() for _ in range(5)]
        assert lines == ["DONE None", "PermissionError", "PermissionError", "PermissionError", "DONE None"]
        assert process.wait(60) == -signal.SIGABRT
        assert secret.read_text() == "secret"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout
        process.stdout.close()


NEITHER = """
import ctypes, struct
from agentgym.tools.sandbox import open_sandbox
from agentgym.tools.sandbox.box.kernel import forbid_new_privileges
from agentgym.tools.sandbox.box.seccomp import install_filter
forbid_new_privileges()
refused = [272, 444] if {machine!r} == "x86_64" else [97, 444]  # unshare, landlock_create_ruleset
program = [(0x20, 0, 0, 0)]
for number in refused: program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
install_filter(b"".join(struct.pack("=HBBI", *one) for one in [*program, (0x06, 0, 0, 0x7FFF0000)]))
try: open_sandbox()
except Exception as error: print(type(error).__name__, error)
with open_sandbox(unsafe=True) as sandbox:
    outcome = sandbox.run("print(open('f').read())", files={{"f": b"42"}}, collect=["f"])
    print(outcome.backend, outcome.stdout.strip(), outcome.files)
    print(sandbox.run("while True: pass", time_limit_s=0.5).ended)
"""


def test_where_no_box_can_be_held_it_refuses_and_only_unsafe_runs() -> None:
    code = NEITHER.format(machine=os.uname().machine)
    without_docker = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=without_docker, capture_output=True, text=True, timeout=120)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("SandboxError no sandbox can be held here (namespaces: "), result
    assert "unshare" in lines[0] and "landlock: the kernel has no Landlock" in lines[0] and "unsafe=True" in lines[0]
    assert lines[1:] == ["none (unsafe) 42 {'f': b'42'}", "time_limit"]
