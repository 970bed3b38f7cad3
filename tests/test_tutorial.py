"""The tutorial's commands run in their order, on the environment that it writes, and have the results that it shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym.rollout.scores.intervals import Interval, success_interval
from agentgym.viewer import read_run

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
PART = re.compile(r"```python\n(?P<code>.*?)```|^    (?P<command>agentgym [^#\n]*)", re.M | re.S)
FIGURE = re.compile(r"0\.\d{3} \[(0\.\d{3}), (0\.\d{3})\]")
KEYBOARD = {"play": "look_up 4711\n"}
"""What a command is typed."""


def changed(source: str, line: str) -> str:
    """Returns the source with the one line that begins like this one replaced by it."""
    start = line.partition("{")[0]
    lines = source.splitlines()
    (index,) = (index for index, each in enumerate(lines) if each.startswith(start))
    return "\n".join([*lines[:index], line, *lines[index + 1 :]]) + "\n"


def outputs(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the commands of the page in their order, each with its output; writes the page's code into its file."""
    for part in PART.finditer(PAGE.read_text(encoding="utf-8")):
        file = folder / "desk.py"
        if code := part["code"]:
            file.write_text(code if "class Desk" in code else changed(file.read_text(), code.rstrip("\n")))
            continue
        words = part["command"].split()
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=folder,
            env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        if words[1] == "view":  # it serves until it is interrupted
            text = process.stdout.readline()
            process.send_signal(signal.SIGINT)
        else:
            text = ""
        text += process.communicate(KEYBOARD.get(words[1], ""), timeout=3600)[0]
        assert process.returncode == 0, f"{part['command']}\n{text}"
        yield " ".join(words[1:]), text


def measured(run: Path, phase: str) -> Interval:
    episodes = [episode for episode in read_run(run).episodes if episode.phase == phase]
    interval = success_interval([bool(each.success) for each in episodes], [str(each.line) for each in episodes])
    assert interval is not None, (run, phase)
    return interval


@pytest.mark.slow
def test_the_tutorial_is_what_its_commands_do(tmp_path: Path) -> None:
    text_of = dict(outputs(tmp_path))
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    passed, not_there = re.findall(r"(\d+) checks pass, and (\d+) are of parts", page)[0]
    assert f"{passed} passed" in text_of["env check desk.py:Desk"], text_of
    assert not_there in text_of["env check desk.py:Desk"]
    assert "1.000" in text_of["eval --env desk.py:Desk --policy oracle -n 20"], "the oracle succeeds on every task"
    assert "tool refund: Refused." in text_of["episodes runs/desk-lessons --failed --text -n 3"]
    runs = [("desk-lessons", "eval_after"), ("desk", "eval_before"), ("desk", "eval_after")]
    for (run, phase), (low, high) in zip(runs, FIGURE.findall(page), strict=True):
        interval = measured(tmp_path / "runs" / run, phase)
        assert interval.low <= float(high) and float(low) <= interval.high, (run, phase, interval, low, high)
