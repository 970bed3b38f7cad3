"""A program that answers lines: what it computes is bounded, and what the machine does to it is no answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agentgym.errors import EnvironmentFault
from agentgym.tools import line_process
from agentgym.tools.line_process import LineProcess

PROGRAM = """
import os, signal, sys
print("ready", flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "compute":
        signal.setitimer(signal.ITIMER_PROF, 0.05)
        while True:
            pass
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "exit":
        sys.exit(3)
    print(word.upper(), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program_that_answers.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def beside(program: Path) -> Callable[[], psutil.Process]:
    """The one process that runs the program."""

    def found() -> psutil.Process:
        (process,) = (process for process in psutil.Process().children() if str(program) in process.cmdline())
        return process

    return found


@pytest.mark.parametrize("question", ["compute", "exit"])
def test_a_question_that_ends_the_program_has_no_answer_and_the_next_one_has(program: Path, question: str) -> None:
    lines = LineProcess(program, "it did not start")
    assert lines.ask("a", 1.0) == "A"
    assert lines.ask(question, 1.0) is None
    assert lines.ask("b", 1.0) == "B"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_somebody_ended_is_begun_again_and_asked_again(
    program: Path, beside: Callable[[], psutil.Process], number: signal.Signals
) -> None:
    lines = LineProcess(program, "it did not start")
    assert lines.ask("a", 1.0) == "A"
    process = beside()
    process.send_signal(number)
    process.wait(10)
    assert lines.ask("b", 1.0) == "B"
    assert os.getpgid(beside().pid) != os.getpgid(0)  # Ctrl-C does not reach it


def test_a_program_that_is_killed_each_time_is_a_fault_and_no_answer(program: Path) -> None:
    lines = LineProcess(program, "it did not start")
    with pytest.raises(EnvironmentFault, match="was killed, or computed less than 5 s in 60 s, 2 times"):
        lines.ask("killed", 5.0)
    assert lines.ask("a", 1.0) == "A"


def test_a_machine_that_is_too_busy_is_at_fault(
    program: Path, beside: Callable[[], psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = LineProcess(program, "it did not start")
    assert lines.ask("a", 1.0) == "A"
    beside().suspend()
    with monkeypatch.context() as patch:
        patch.setattr(line_process, "STARVED_S", 0.2)
        patch.setattr(line_process, "NUM_TRIES", 1)
        with pytest.raises(EnvironmentFault, match="a machine that is overloaded"):
            lines.ask("b", 0.2)
    assert lines.ask("c", 1.0) == "C"


def test_a_program_that_does_not_start_is_an_error_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(EnvironmentFault, match="install it"):
        LineProcess(tmp_path / "broken.py", "install it").ask("a", 1.0)
