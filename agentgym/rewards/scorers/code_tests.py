"""A scorer of programs by their tests."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeGuard

from agentgym.errors import NOT_JSON
from agentgym.rewards.registry import REWARDS, in_processes
from agentgym.rewards.reply import ground_truth, last_reply
from agentgym.rewards.reward import InvalidReward, Reward
from agentgym.rewards.scorers.code_process import JOB_FILE, MAX_FILE_BYTES
from agentgym.tools.code import shared_sandbox
from agentgym.tools.sandbox import SandboxLimits
from agentgym.tools.sandbox.service_settings import backend_of_run, is_service
from agentgym.trajectory import Trajectory
from agentgym.types import JSON, Task

__all__ = ["code"]

PROGRAM = Path(__file__).with_name("code_process.py")
FENCE = re.compile(r"```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Test:
    """Either code that raises if the program is wrong, or the program's input and expected output."""

    code: str | None = None
    input: str = ""
    output: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Budget:
    """The limits of a program's tests: computing time, wall-clock time, memory."""

    cpu_s: float
    wall_s: float
    memory_mb: int


@REWARDS.register("code")
@in_processes
def code(
    trajectory: Trajectory,
    task: Task,
    *,
    seconds: float = 10.0,
    wall_seconds: float = 30.0,
    memory_mb: int = 1024,
    partial: bool = False,
) -> Reward:
    """Returns 1 if the program in the reply's last fenced block (or the reply itself) passes all tests, otherwise 0.

    With `partial`, it returns the share of the tests that pass. The ground truth is Python code that raises if the
    program is wrong; a list of such code; `{"test": ..., "entry_point": ...}` as in HumanEval; or
    `{"inputs": [...], "outputs": [...]}` for standard input and output, with `fn_name` for calls of a function. An
    object or list may be JSON text.

    Each test runs in its own process and folder, with a limit on memory and files. `seconds` of computing time and
    `wall_seconds` by the clock (a program may wait, and the machine may be busy) are limits for all tests together: the
    tests that remain when they are used up have failed. That is the program's mistake, and no failure of the reward,
    whose `timeout_s` has to be longer. This contains accidents and is no sandbox: the program has the user's rights and
    network, and a program that is written to fool its tests can do so. With `sandbox.url` a code execution service runs
    the tests instead, each for the time that is left of the two; if it runs none, the reward has failed.
    """
    tests = _tests(ground_truth(task))
    program = _program(last_reply(trajectory))
    budget = _Budget(cpu_s=seconds, wall_s=wall_seconds, memory_mb=memory_mb)
    passed = _num_passed(program, tests, budget)
    share = passed / len(tests)
    right = passed == len(tests)
    return Reward(share if partial else float(right), {"tests_passed": share}, success=right)


def _program(reply: str) -> str:
    blocks: list[str] = FENCE.findall(reply)
    return blocks[-1] if blocks else reply


def _tests(truth: JSON) -> list[_Test]:
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        with suppress(*NOT_JSON):  # Python code may begin with a bracket
            truth = json.loads(truth)
    if isinstance(truth, str):
        return [_Test(code=truth)]
    if isinstance(truth, Mapping) and isinstance(truth.get("test"), str):
        entry = truth.get("entry_point")
        return [_Test(code=f"{truth['test']}\n{f'check({entry})' if entry else ''}")]
    if isinstance(truth, Mapping):
        return _pairs(truth)
    if isinstance(truth, (list, tuple)) and truth and all(isinstance(test, str) for test in truth):
        return [_Test(code=str(test)) for test in truth]
    raise InvalidReward(
        f"the ground truth of code is test code, a list of it, or inputs and outputs; got {truth!r:.80}"
    )


def _pairs(truth: Mapping[str, JSON]) -> list[_Test]:
    inputs, outputs, name = truth.get("inputs"), truth.get("outputs"), truth.get("fn_name")
    if not _is_list(inputs) or not _is_list(outputs) or len(inputs) != len(outputs) or not inputs:
        raise InvalidReward(f"inputs and outputs are lists of the same length, at least 1; got {dict(truth)!r:.80}")
    pairs = zip(inputs, outputs, strict=True)
    if name is None:
        return [_Test(input=_text(test_input), output=_text(test_output)) for test_input, test_output in pairs]
    return [_Test(code=f"assert {name}(*{arguments!r}) == {result!r}") for arguments, result in pairs]


def _is_list(value: JSON) -> TypeGuard[Sequence[JSON]]:
    return isinstance(value, (list, tuple))


def _text(value: JSON) -> str:
    return "\n".join(str(line) for line in value) if _is_list(value) else str(value)


def _num_passed(program: str, tests: Sequence[_Test], budget: _Budget) -> int:
    passed, left = 0, budget
    passes = _passes_elsewhere if is_service(backend_of_run("auto")) else _passes
    for test in tests:
        if left.cpu_s <= 0 or left.wall_s <= 0:
            break
        has_passed, cpu_s, wall_s = passes(program, test, left)
        passed += has_passed
        left = replace(left, cpu_s=left.cpu_s - cpu_s, wall_s=left.wall_s - wall_s)
    return passed


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _passes(program: str, test: _Test, budget: _Budget) -> tuple[bool, float, float]:
    """Returns whether the test passes, its computing time, and its time by the clock."""
    cpu_before, started = _children_s(), time.monotonic()
    job = _job(program, test)
    limits = {"cpu_s": math.ceil(budget.cpu_s), "wall_s": budget.wall_s, "memory_mb": budget.memory_mb}
    with tempfile.TemporaryDirectory(prefix="agentgym-code-") as folder, tempfile.TemporaryFile() as printed:
        ended_well = _run(json.dumps(job | limits), folder, budget.wall_s, printed)
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    has_passed = ended_well and _is_right(output, test, job["proof"])
    return has_passed, _children_s() - cpu_before, time.monotonic() - started


def _passes_elsewhere(program: str, test: _Test, budget: _Budget) -> tuple[bool, float, float]:
    """Returns the same by the run's code execution service. Time that the service takes besides counts for nothing.

    Raises SandboxError if it runs no program: that is no zero of the model's.
    """
    job = _job(program, test)
    limits = SandboxLimits(time_limit_s=3600.0, memory_mb=budget.memory_mb, output_kb=MAX_FILE_BYTES >> 10)
    seconds = min(budget.cpu_s, budget.wall_s)
    sandbox = shared_sandbox("auto", limits)
    outcome = sandbox.run(PROGRAM.read_text(), files={JOB_FILE: json.dumps(job).encode()}, time_limit_s=seconds)
    has_passed = outcome.ok and _is_right(outcome.stdout, test, job["proof"])
    return has_passed, outcome.seconds, outcome.seconds


def _job(program: str, test: _Test) -> dict[str, str | None]:
    return {"program": program, "test": test.code, "input": test.input, "proof": secrets.token_hex(16)}


def _is_right(output: str, test: _Test, proof: str | None) -> bool:
    """Returns whether what a process printed shows that its test has passed."""
    if test.code is not None:
        return output == proof  # a program that exits early did not reach its tests
    return _lines(output) == _lines(test.output)


def _run(job: str, folder: str, wall_s: float, printed: IO[bytes]) -> bool:
    """Runs one process; returns true if it ended without an error."""
    with subprocess.Popen(
        [sys.executable, "-I", str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=printed,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "LANG": "C.UTF-8"},
        start_new_session=True,
    ) as process:
        try:
            process.communicate(job.encode(), timeout=wall_s)
        except subprocess.TimeoutExpired:
            return False
        except BrokenPipeError as error:
            raise InvalidReward("the process of a test did not take its program") from error
        finally:
            _end_group(process.pid)
    return process.returncode == 0


def _end_group(group: int) -> None:
    """Ends the process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
