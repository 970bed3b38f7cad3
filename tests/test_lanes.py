"""`.ci/lanes.sh`: parts run side by side, and none fails, hangs or stays unnoticed."""

from __future__ import annotations

import os
import signal
import subprocess
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
    return [found.pid for found in psutil.process_iter(["cmdline"]) if found.info["cmdline"] == ["sleep", NAP]]


def test_lanes_meet_each_other_and_print_the_output_of_each_part_in_one_piece(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it waits for the other side: lanes that run one after the other would hang
    done = run(
        f"writes() {{ part writing 60 bash -c 'echo one; echo two > {pipe}; echo three'; }}",
        f"reads() {{ part reading 60 cat {pipe}; part after 60 echo last; }}",
        "side_by_side writes reads",
        "echo passed",
    )
    assert done.returncode == 0, done.stderr
    assert "==> output of writing:\none\nthree\n==> writing: passed in " in done.stdout
    assert "==> output of reading:\ntwo\n==> reading: passed in " in done.stdout
    assert done.stdout.index("reading: passed") < done.stdout.index("output of after:\nlast\n")
    assert done.stdout.endswith("passed\n")


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
    assert "==> endless: ended before it was finished; its last lines:\nstarted\n" in done.stdout
    assert "never" not in done.stdout and "passed\n" not in done.stdout
    assert f"==> failed with exit status {status} after " in done.stderr


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
