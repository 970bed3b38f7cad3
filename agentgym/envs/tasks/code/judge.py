"""Judges a program by tests that it never sees: it computes values in a sandbox, and they are compared outside.

The program's process gets arguments and writes what its function gave. It holds neither the values that are wanted nor
anything that decides, so what it forges is one more answer. Answers come out as plain values (`plain_values.py`): no
object of the program's, with an `__eq__` of its own, is ever compared.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from agentgym.envs.tasks.code.plain_values import NotPlain, dumps, loads
from agentgym.envs.tasks.code.problem import CodeProblem
from agentgym.errors import EnvironmentFault
from agentgym.tools.sandbox import Ended, Outcome, Sandbox

__all__ = ["ProgramVerdict", "judge_program"]

MAX_ANSWER_BYTES = 1 << 20
EXCEPTIONS = frozenset(
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
)
CALLER = """
import plain_values
with open("calls.json", encoding="ascii") as file:
    name, calls = plain_values.loads(file.read())
names = {"__name__": "solution"}
with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
    exec(compile(file.read(), "solution.py", "exec"), names)
answers = []
for arguments in calls:
    try:
        told = plain_values.dumps(names[name](*arguments))
        answers.append(("gave", told))
    except Exception as error:
        answers.append(("raised", type(error).__name__))
with open("answers.json", "w", encoding="ascii") as file:
    file.write(plain_values.dumps(answers))
"""
"""Runs in the program's process, and calls it."""
TESTER = """
import random
import plain_values
with open("answers.json", encoding="ascii") as file:
    name, answers = plain_values.loads(file.read())
names = {"__name__": "test"}
with open("solution.py", encoding="utf-8") as file:
    exec(compile(file.read(), "solution.py", "exec"), names)
right, calls = names[name], []
def candidate(*arguments):
    calls.append(plain_values.dumps(arguments))
    if answers is None:
        return right(*arguments)
    return plain_values.loads(answers[len(calls) - 1])
with open("test.py", encoding="utf-8") as file:
    exec(compile(file.read(), "test.py", "exec"), names)
random.seed(0)
try:
    names["check"](candidate)
    passed = True
except Exception:
    passed = False
with open("verdict.json", "w", encoding="ascii") as file:
    file.write(plain_values.dumps((passed, calls)))
"""
"""Runs the tests of a problem in a sandbox without the program: on its recorded answers, or to learn the calls."""
STOP_TEXTS = {
    Ended.TIME_LIMIT: "it takes too long",
    Ended.MEMORY: "it takes too much memory",
    Ended.PROCESS_LIMIT: "it starts too many processes",
    Ended.DISK_LIMIT: "it writes too much",
    Ended.OUTPUT_LIMIT: "it prints too much",
    Ended.KILLED: "its process was killed",
}


@dataclass(frozen=True)
class ProgramVerdict:
    """The verdict on a program: whether it passes, and why not."""

    passed: bool
    why: str = ""


def judge_program(program: str, problem: CodeProblem, sandbox: Sandbox) -> ProgramVerdict:
    """Judges a program; raises EnvironmentFault if the problem's own tests do not run."""
    calls = [dumps(arguments) for arguments, _ in problem.cases] or _calls_of(problem, sandbox)
    calls_text = dumps((problem.entry_point, [loads(call) for call in calls]))
    outcome = _run(sandbox, CALLER, {"solution.py": program, "calls.json": calls_text}, "answers.json")
    written = outcome.files.get("answers.json")
    if outcome.ended is not Ended.EXITED:
        return ProgramVerdict(False, STOP_TEXTS[outcome.ended])
    if outcome.exit_code or written is None:
        return ProgramVerdict(False, _error_of(outcome))
    if len(written) > MAX_ANSWER_BYTES:
        return ProgramVerdict(False, "what it gives is too large")
    answers = _answers(written, len(calls))
    if answers is None:
        return ProgramVerdict(False, "it gives no plain values")
    raised = next((value for kind, value in answers if kind != "gave"), None)
    if raised is not None:
        return ProgramVerdict(False, f"it raises {_public(raised)}")
    results = [value for _, value in answers]
    if problem.cases:
        expected = [value for _, value in problem.cases]
        num_right = sum(_gives(text, value) for text, value in zip(results, expected, strict=True))
        return ProgramVerdict(num_right == len(expected), f"it is right on {num_right} of {len(expected)}")
    passed, num_calls = _run_tests(problem, sandbox, results)
    if passed and num_calls != calls:
        raise EnvironmentFault(f"the tests of {problem.name} do not make the same calls twice")
    return ProgramVerdict(passed, "" if passed else "a value is wrong")


def _answers(written: bytes, number: int) -> list[tuple[str, str]] | None:
    """The kind and the text of each answer; None for anything else that a program may have written."""
    try:
        answers = loads(written)
    except NotPlain:
        return None
    if not isinstance(answers, list) or len(answers) != number:
        return None
    fits = all(
        isinstance(answer, tuple) and len(answer) == 2 and all(type(part) is str for part in answer)
        for answer in answers
    )
    return answers if fits else None


def _gives(result: str, expected: object) -> bool:
    try:
        return bool(loads(result) == expected)
    except NotPlain:
        return False


def _public(name: str) -> str:
    """The name of an exception, unless the program made it up: a name could reveal what the tests ask."""
    return name if name in EXCEPTIONS else "an exception of its own"


def _error_of(outcome: Outcome) -> str:
    match = re.search(r"^(\w+)(?::|$)", (outcome.stderr.strip().splitlines() or [""])[-1])
    if match is None or not outcome.exit_code:
        return "it ends before it is called"
    return f"it does not run: {_public(match.group(1))}"


_learned: dict[str, list[str]] = {}
"""Maps a test to the arguments of the calls that it makes."""


def _calls_of(problem: CodeProblem, sandbox: Sandbox) -> list[str]:
    """The arguments of the calls that a problem's test makes, learned from its own solution."""
    if problem.test not in _learned:
        passed, calls = _run_tests(problem, sandbox, None)
        if not passed:
            raise EnvironmentFault(f"the solution of {problem.name} does not pass its own tests")
        _learned[problem.test] = calls
    return _learned[problem.test]


def _run_tests(problem: CodeProblem, sandbox: Sandbox, answers: Sequence[str] | None) -> tuple[bool, list[str]]:
    """Runs the test on answers (None: on the solution); returns whether it passes, and the calls that it makes."""
    answers_text = dumps((problem.entry_point, None if answers is None else list(answers)))
    contents = {"solution.py": problem.solution, "test.py": problem.test, "answers.json": answers_text}
    outcome = _run(sandbox, TESTER, contents, "verdict.json")
    if not outcome.ok or "verdict.json" not in outcome.files:
        if answers is not None:  # a value of the program may be too much for the test
            return False, []
        raise EnvironmentFault(f"the tests of {problem.name} do not run ({outcome.ended}): {outcome.stderr[-500:]}")
    passed, calls = loads(outcome.files["verdict.json"])
    return passed, calls


def _run(sandbox: Sandbox, code: str, texts: dict[str, str], result_name: str) -> Outcome:
    contents: dict[str, Any] = {name: text.encode("utf-8", "surrogatepass") for name, text in texts.items()}
    contents["plain_values.py"] = files("agentgym.envs.tasks.code").joinpath("plain_values.py").read_bytes()
    return sandbox.run(code, files=contents, collect=[result_name])
