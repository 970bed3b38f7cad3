"""What programs write where it is hard to count and to remove: it is bounded in every box, and gone afterwards."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from agentgym.tools.sandbox import Ended, SandboxLimits, open_sandbox
from agentgym.tools.sandbox.box.folders import MAX_DEPTH, empty_folder

DEEP = "import os\nfor _ in range({}):\n    os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()\n"
WRITES = {
    "deeper than a path": "for _ in range(20):\n    os.mkdir('d' * 250); os.chdir('d' * 250)\nfill(open)",
    "where nobody may look": "os.mkdir('d', 0o300); os.chdir('d')\nfill(open)",
    "to files without a name": "def nameless(name, mode):\n    file = open(name, mode, 0)\n    os.unlink(name)\n"
    "    return file\nfill(nameless)",
}
FILL = """
import os, time
def fill(opens):
    kept = []
    for number in range(40):
        file = opens(f'f{number}', 'wb')
        file.write(bytes(1 << 20)); file.flush()
        kept.append(file)
    time.sleep(6)
    print('written')
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", WRITES)
def test_a_disk_is_bounded_wherever_a_program_writes(where: str, opened: Any) -> None:
    (outcome,) = opened.run_all([{"code": FILL + WRITES[where], "time_limit_s": 8.0}])
    if opened.backend == "landlock":
        assert outcome.ended is Ended.DISK_LIMIT
    else:
        assert "No space left on device" in outcome.stderr
    opened.assert_at_rest()


@pytest.mark.parametrize(("backend", "depth"), [("namespaces", 1200), ("landlock", MAX_DEPTH - 1)])
def test_folders_as_deep_as_they_may_go_end_no_program_and_are_removed(backend: str, depth: int) -> None:
    limits = SandboxLimits(time_limit_s=60.0)  # a busy disk takes its time to make them
    with open_sandbox(backend, limits=limits) as opened:
        assert opened.run(DEEP.format(depth), collect=["*"]).ok
        with opened.session() as session:
            assert session.run(DEEP.format(depth)).ok
            after = session.run("print(1)", collect=["*"])
            assert after.stdout == "1\n" and not after.is_lost
        scratch = opened._server._finish.peek()[2][2]  # type: ignore[attr-defined]
        deadline = time.monotonic() + 60.0
        while scratch and os.listdir(scratch):  # a session's goes a moment after it
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_folders_that_go_too_deep_on_a_shared_disk_end_the_program() -> None:
    with open_sandbox("landlock", limits=SandboxLimits(time_limit_s=60.0)) as opened:
        assert opened.run(DEEP.format(4000) + "import time; time.sleep(60)").ended is Ended.DISK_LIMIT
        assert opened.run("print(1)").ok


def test_a_folder_is_emptied_whatever_its_modes_and_links(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "a/b/c").mkdir(parents=True)
    (folder / "a/b/c/f").write_text("x")
    outside.mkdir(mode=0o750)
    (outside / "kept").write_text("x")
    (folder / "a/link").symlink_to(outside)
    (folder / "link").symlink_to(outside)
    for path in ("a/b", "a"):
        (folder / path).chmod(0)
    empty_folder(str(folder))
    assert os.listdir(folder) == []
    assert (outside / "kept").read_text() == "x" and outside.stat().st_mode & 0o777 == 0o750
