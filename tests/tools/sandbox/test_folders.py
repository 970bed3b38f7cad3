"""Named folders of a box, and a box with the operations of a container."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentgym.errors import ConfigError, SandboxError
from agentgym.tools.sandbox import Sandbox, SandboxLimits, open_sandbox
from agentgym.tools.sandbox.workspace import BoxWorkspace

FOLDERS = ("app", "home/user", "tests")
LIMITS = SandboxLimits(time_limit_s=5.0, memory_mb=256, scratch_mb=8, output_kb=8)


@pytest.fixture(params=["namespaces", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with open_sandbox(request.param, limits=LIMITS, folders=FOLDERS) as opened:
        yield opened


def test_folders_are_below_the_working_folder_and_below_the_root(sandbox: Sandbox) -> None:
    outcome = sandbox.run("echo a > app/x; echo b > home/user/y; cat /app/x /home/user/y", language="shell")
    assert outcome.stdout == ("a\nb\n" if sandbox.backend == "namespaces" else "")
    assert not sandbox.run("ls app home/user", language="shell", files={"app/z": b""}).stdout.count("x")


def test_folders_that_lead_elsewhere_are_refused() -> None:
    for name in ("", "/app", "../app", "a/../../b"):
        with pytest.raises(ConfigError, match="folders are paths relative to the root"):
            open_sandbox("landlock", folders=(name,))
    with pytest.raises(ConfigError, match="the sandbox docker has one folder"):
        open_sandbox("docker", folders=("app",))
    with pytest.raises(SandboxError, match="/usr holds Python or packages"):
        open_sandbox("namespaces", folders=("usr",))


def test_a_new_box_has_the_files_and_no_process_of_the_old_one(sandbox: Sandbox) -> None:
    box = BoxWorkspace(sandbox, FOLDERS, prelude="A=1\n")
    box.write({"app/deep/a.txt": b"a", "tests/t.sh": b"false"})
    ran = box.run("echo $A; ln -s deep/a.txt app/link; echo b > loose; sleep 100 & exit 3")
    assert (ran.output, ran.exit_code, ran.timed_out, ran.is_cut) == ("1\n", 3, False, False)
    box.renew(without=("tests",))
    assert box.run("cat app/link loose; ls tests; ls -a").output.split("\n")[0] == "ab"
    assert box.read("app/deep/a.txt") == b"a" and box.read("app/link") is None and box.read("tests/t.sh") is None
    assert box.run("yes").is_cut and box.run("sleep 60", time_limit_s=0.3).timed_out
    assert box.run("kill -9 $$").exit_code == 137
    box.run("rm -rf app home; ln -s . app; ln -s / home")
    box.renew()
    assert box.run("[ -L app ] || [ -L home ]; echo $?").output == "1\n"  # they are folders again
    box.close()
    box.close()
    with pytest.raises(SandboxError, match="closed"):
        box.run("true")
