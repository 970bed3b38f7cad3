"""`.ci/lanes.sh`: parts run side by side, and none fails, hangs or stays unnoticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

LANES = Path(__file__).parent.parent / ".ci" / "lanes.sh"
NAP = f"86399.{os.getpid()}"
"""The seconds of a `sleep`, by which the processes of these lanes are found."""


def script(*lines: str) -> list[str]:
    return ["bash", "-c", "\n".join(["set -euo pipefail", f"source {LANES}", *lines])]


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(script(*lines), capture_output=True, text=True, timeout=120, check=False)
    assert not sleepers()
    return done


def sleepers() -> list[int]:
    return [process.pid for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", NAP]]


def test_lanes_meet_each_other_and_print_the_output_of_each_part_in_one_piece(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it waits for the other side: lanes that run one after the other would hang
    done = run(
        f"writes() {{ part writing 60 bash -c 'echo one; echo two > {pipe}; echo three'; }}",
        f"reads() {{ part reading 60 cat {pipe}; part after 60 echo last; }}",
        "side_by_side writes reads",
        "print_parts",
        "echo passed",
    )
    assert done.returncode == 0, done.stderr
    assert "==> output of writing:\none\nthree\n==> writing: passed in " in done.stdout
    assert "==> output of reading:\ntwo\n==> reading: passed in " in done.stdout
    assert done.stdout.index("reading: passed") < done.stdout.index("output of after:\nlast\n")
    table = done.stdout[done.stdout.index("==> part") :].splitlines()
    assert sorted(line.split()[0] for line in table[1:-2]) == ["after", "reading", "writing"]
    assert table[-2].split()[0] == "sum" and table[-1] == "passed"


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("bash -c 'echo why; exit 7'", 7, "why\n==> second: failed with exit status 7\n"),
        (f"sleep {NAP}", 124, "==> second: stopped after 1 s\n"),
        ("no-such-command", 127, "==> second: failed with exit status 127\n"),
    ],
    ids=["fails", "hangs", "cannot start"],  # the commands hold the number of this process
)
def test_a_part_that_fails_hangs_or_cannot_start_fails_the_whole_and_ends_the_others(
    command: str, status: int, message: str
) -> None:
    done = run(
        f"endless() {{ part endless 60 bash -c 'echo started; sleep {NAP}'; }}",
        f"fails() {{ part first 60 sleep 0.5; part second 1 {command}; part third 60 echo never; }}",
        "side_by_side endless fails",
        "echo passed",
    )
    assert done.returncode == status
    assert message in done.stdout
    assert "==> endless: ended before it was finished; its errors and last lines:\nstarted\n" in done.stdout
    assert "never" not in done.stdout and "passed\n" not in done.stdout
    assert f"==> failed with exit status {status} after " in done.stderr


@pytest.mark.long
def test_a_lane_that_is_ended_tells_which_tests_have_failed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "test_sums.py").write_text(
        "import pathlib, time\n\n\ndef test_wrong():\n    assert 1 + 1 == 3\n\n\n"
        f"def test_endless():\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(600)\n"
    )
    done = run(
        f"tests() {{ part tests 60 {sys.executable} -m pytest -n0 -c /dev/null {tmp_path}; }}",
        f"fails() {{ part fails 60 bash -c 'until [ -e {begun} ]; do sleep 0.1; done; exit 3'; }}",
        "side_by_side tests fails",
    )
    assert done.returncode == 3
    assert "==> tests: ended before it was finished; its errors and last lines:\nE " in done.stdout
    assert "assert (1 + 1) == 3" in done.stdout and "1 failed" in done.stdout


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_lane(number: signal.Signals, status: int) -> None:
    lines = [f"{name}() {{ part {name} 60 sleep {NAP}; }}" for name in ("one", "two")]
    with subprocess.Popen(script(*lines, "side_by_side one two"), stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while len(sleepers()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == status
    assert not sleepers()
