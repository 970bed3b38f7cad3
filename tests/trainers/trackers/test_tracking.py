"""Trackers are told everything in order, and nothing that they do reaches the run."""

from __future__ import annotations

import logging
import posixpath
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import ConfigError, UnknownName, UserCodeFault
from agentgym.trainers.trackers import TRACKERS, TrackedRun, Tracker, TrackingConfig, open_tracker
from agentgym.trainers.trackers.follower import Follower
from agentgym.trainers.trackers.mlflow_names import mlflow_name

OWN = """
class Lines:
    def begin(self, run):
        self.path = run.folder / "lines.txt"
    def step(self, step, metrics):
        with open(self.path, "a") as file:
            file.write(f"{step}\\n")
    def episodes(self, step, sample):
        pass
    def finish(self):
        pass

class Half:
    def begin(self, run):
        pass

class Bursts(Lines):
    def __init__(self):
        raise RuntimeError("no such disk")

NOTHING = 3
"""


class Noted:
    """Notes what it is told; waits at `begin` until it may go on, and raises at a step if asked."""

    def __init__(self, raises_at: int | None = None) -> None:
        self.calls: list[Any] = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.raises_at = raises_at

    def begin(self, run: TrackedRun) -> None:
        self.begun.set()
        self.may_go_on.wait(60)
        self.calls.append(run.name)

    def step(self, step: int, metrics: Any) -> None:
        if step == self.raises_at:
            raise OSError("the server is gone\nand a traceback follows")
        self.calls.append(step)

    def episodes(self, step: int, sample: Sequence[Any]) -> None:
        self.calls.append(list(sample))

    def finish(self) -> None:
        self.calls.append("finished")


def follow(tracker: Noted, tmp_path: Path, room: int = 100) -> Follower:
    follower = Follower("noted", tracker, room)
    follower.begin(TrackedRun(name="run", project="p", folder=tmp_path, config={}))
    assert tracker.begun.wait(60)
    return follower


def tell(follower: Follower, *steps: int) -> None:
    for step in steps:
        follower.tell(lambda tracker, step=step: tracker.step(step, {}))  # type: ignore[misc]


def test_a_tracker_receives_everything_in_order_and_finishes_last(tmp_path: Path) -> None:
    tracker = Noted()
    tracker.may_go_on.set()
    follower = follow(tracker, tmp_path)
    tell(follower, 1, 2, 3)
    follower.finish(60)
    assert tracker.calls == ["run", 1, 2, 3, "finished"]
    assert follower.num_dropped == 0


def test_what_a_slow_tracker_has_no_room_for_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Noted()
    follower = follow(tracker, tmp_path, room=2)
    tell(follower, 1, 2, 3, 4, 5)
    assert follower.num_dropped == 3
    tracker.may_go_on.set()
    follower.finish(60)
    assert tracker.calls == ["run", 1, 2, "finished"]
    assert "was too slow: 3 entries were left out" in caplog.text


def test_a_tracker_that_fails_is_named_once_finished_and_told_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Noted(raises_at=2)
    tracker.may_go_on.set()
    follower = follow(tracker, tmp_path)
    tell(follower, 1, 2, 3, 2)
    follower.finish(60)
    assert tracker.calls == ["run", 1, "finished"]  # or its library would take the run for one that goes on
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "the tracker noted failed and is switched off, the run goes on: OSError: the server is gone",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("success", "success"),
        ("pass@1", "pass_1"),
        ("eval_success/own.py:Lock", "eval_success/own.py:Lock"),
        ("eval_success//tmp/../own.py:Lock", "eval_success/tmp/__/own.py:Lock"),
        ("./a%", "_/a_"),
        ("reward[0]/☕\n", "reward_0_/__"),
        ("", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_a_name_that_mlflow_refuses_is_spelled_in_its_characters(name: str, expected: str) -> None:
    assert mlflow_name(name) == expected
    assert re.fullmatch(r"[/\w.\- :]+", expected) and posixpath.normpath(expected) == expected and expected[0] != "/"


def test_a_tracker_that_hangs_is_left_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Noted()
    follower = follow(tracker, tmp_path)
    tell(follower, 1)
    follower.finish(0.01)
    tracker.may_go_on.set()
    assert "the tracker noted has not finished after 0.01 s" in caplog.text


def test_a_tracker_of_ones_own_is_found_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    tracker: Tracker = open_tracker(f"{tmp_path}/own.py:Lines")
    tracker.begin(TrackedRun(name="run", project="p", folder=tmp_path, config={}))
    tracker.step(7, {})
    assert (tmp_path / "lines.txt").read_text() == "7\n"
    with pytest.raises(ConfigError, match="lacks step, episodes, finish"):
        open_tracker(f"{tmp_path}/own.py:Half")
    with pytest.raises(ConfigError, match="is a int: a class without arguments was wanted"):
        open_tracker(f"{tmp_path}/own.py:NOTHING")
    with pytest.raises(UserCodeFault, match="no such disk"):
        open_tracker(f"{tmp_path}/own.py:Bursts")
    with pytest.raises(UnknownName, match="did you mean 'Lines'"):
        open_tracker(f"{tmp_path}/own.py:Line")


def test_an_unknown_tracker_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownName, match="did you mean 'tensorboard'"):
        open_tracker("tensorbord")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_library_that_is_missing_is_named_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [module_name for module_name in sys.modules if module_name.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    for module in ("torch.utils.tensorboard", f"agentgym.trainers.trackers.{name}"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install .*\[{name}\]'"):
        open_tracker(name)


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ({"episodes": 0}, {"episodes_every": -1}, {"project": ""}):
        with pytest.raises(ConfigError, match=f"tracking.{next(iter(wrong))}"):
            TrackingConfig(**wrong)  # type: ignore[arg-type]
