"""Hundreds of episodes with python and shell tools, a tenth of them hostile, leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EPISODES = 400


@pytest.mark.slow
def test_hostile_episodes_leave_nothing_and_disturb_nobody() -> None:
    """Ten kinds of attack, four times each; `python benchmarks/episodes.py` plays 2,000."""
    arguments = ["--episodes", str(EPISODES), "--concurrency", "64", "--json"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "episodes.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["disturbed"] == 0 and report["marked"] == []
    assert report["outcomes"]["honest: solved"] == EPISODES * 9 // 10
    assert sum(count for name, count in report["outcomes"].items() if "honest" not in name) == EPISODES // 10
    first, last = report["rows"][0], report["rows"][-1]
    for name in ("processes", "files", "server_files", "ports", "threads", "temporary"):
        assert last[name] <= first[name], name
    assert last["rss_mb"] < first["rss_mb"] + 16 and last["server_mb"] < first["server_mb"] + 8
