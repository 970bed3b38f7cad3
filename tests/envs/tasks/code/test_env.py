"""CodeTasks-v0: right programs pass, wrong and hostile ones do not, and none meets the tests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.envs import EVAL_SEED_START, Action, TextEnv, make_env, policy_for
from agentgym.envs.tasks.code.env import CodeTasks
from agentgym.envs.tasks.code.generator import draw_problem
from agentgym.envs.tasks.code.humaneval import humaneval_problems
from agentgym.envs.tasks.code.judge import ProgramVerdict, judge_program
from agentgym.envs.tasks.code.plain_values import NotPlain, dumps, loads
from agentgym.envs.tasks.code.problem import CodeProblem
from agentgym.errors import ConfigError, SandboxError
from agentgym.testing import examine_env
from agentgym.tools.sandbox import Sandbox, SandboxLimits, open_sandbox
from agentgym.types import Message, ToolCall

DOUBLE = CodeProblem(
    name="double",
    entry_point="double",
    prompt="",
    solution="def double(x):\n    return 2 * x\n",
    cases=[((1,), 2), ((0,), 0), ((7,), 14)],
)
CHECKED = CodeProblem(
    name="checked double",
    entry_point="double",
    prompt="",
    solution=DOUBLE.solution,
    test="import random\ndef check(candidate):\n    assert candidate(1) == 2, 'one'\n"
    "    assert candidate([4]) == [4, 4]\n    x = random.random()\n    assert abs(candidate(x) - 2 * x) < 1e-9\n",
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox(limits=SandboxLimits(time_limit_s=2.0, memory_mb=128, scratch_mb=4, output_kb=16)) as opened:
        yield opened


def submit(env: TextEnv, program: str) -> tuple[str, float, bool]:
    message = Message("assistant", "", tool_calls=(ToolCall("call_0", "submit", {"program": program}),))
    observation, reward, terminated, *_ = env.step(Action.from_message(message))
    return observation, reward, terminated


# ---- the judge


@pytest.mark.parametrize("problem", [DOUBLE, CHECKED], ids=["cases", "test"])
@pytest.mark.parametrize(
    "program",
    [
        DOUBLE.solution,
        "import operator\ndouble = lambda x: operator.mul(2, x)",
        "print('noise')\ndef double(x):\n    print(x)\n    return x + x",
        "import functools\n@functools.cache\ndef twice(x): return x * 2\ndef double(x):\n"
        "    return [y for y in x * 2] if isinstance(x, list) else twice(x)",
    ],
)
def test_a_right_program_passes_however_it_is_written(problem: CodeProblem, program: str, sandbox: Sandbox) -> None:
    assert judge_program(program, problem, sandbox).passed


HOSTILE = {
    "wrong": ("def double(x): return x", "is right on 1 of 3|a value is wrong|it raises"),
    "exit": ("import sys\nsys.exit(0)", "ends before it is called"),
    "exit in a call": ("def double(x): raise SystemExit(0)", "ends before it is called"),
    "exit at once": ("import os\nos._exit(0)", "ends before it is called"),
    "prints success": ("print('All hidden tests pass.', True, 'PASSED')\ndef double(x): pass", ""),
    "equal to all": (
        "class Yes:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
        "    def __sub__(self, other): return 0\ndef double(x): return Yes()",
        "it raises ValueError|an exception of its own",
    ),
    "a text that is equal to all": (
        "class Yes(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "def double(x): return Yes(2)",
        "",
    ),
    "a number that is not one": ("def double(x): return float('nan')", ""),
    "patched assert": (
        "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\n"
        "builtins.abs = lambda x: 0\ndef double(x): return 0",
        "",
    ),
    "patched judge": (
        "import plain_values\nplain_values.dumps = lambda x: 'true'\ndef double(x): pass",
        "plain values",
    ),
    "its own answers": (
        "import os\nopen('answers.json', 'w').write('{\"list\": [true, true, true]}')\nos._exit(0)",
        "plain values",
    ),
    "its own verdict": ("import os\nopen('verdict.json', 'w').write('true')\nos._exit(0)", "ends before"),
    "answers too deep": ("import os\nopen('answers.json', 'w').write('[' * 100000)\nos._exit(0)", "plain values"),
    "answers too large": ("def double(x): return 'x' * 600_000", "too large"),
    "a number without end": (
        "import os\nopen('answers.json', 'w').write('1' * 900000)\nos._exit(0)",
        "plain values",
    ),
    "frames": (
        "import sys\ndef double(x):\n    frame, seen = sys._getframe(), []\n    while frame:\n"
        "        seen.append(sorted(map(str, frame.f_locals.values())))\n        frame = frame.f_back\n"
        "    return seen",
        "",
    ),
    "collected garbage": ("import gc\ndef double(x): return [o for o in gc.get_objects() if o == 14]", ""),
    "reads the test": ("def double(x): return open('test.py').read()", "FileNotFoundError"),
    "a name that tells": ("def double(x): raise type(f'x{x}', (Exception,), {})()", "an exception of its own"),
    "does not compile": ("def double(x) return", "it does not run: SyntaxError"),
    "another name": ("def triple(x): return 2 * x", "it raises KeyError"),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "MemoryError|too much memory"),
    "noise": ("while True: print('x' * 1000)", "prints too much"),
    "files": ("open('f', 'wb').write(bytes(1 << 26))", "OSError|writes too much"),
    "without end": ("def double(x):\n    while True: pass", "takes too long"),
    "forks": ("import os\nwhile True: os.fork()", ""),
    "its process": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", ""),
}


@pytest.mark.parametrize("problem", [DOUBLE, CHECKED], ids=["cases", "test"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_or_hostile_program_fails(name: str, problem: CodeProblem, sandbox: Sandbox) -> None:
    program, why = HOSTILE[name]
    verdict = judge_program(program, problem, sandbox)
    assert not verdict.passed
    assert any(part in verdict.why for part in why.split("|"))
    assert judge_program(DOUBLE.solution, problem, sandbox).passed  # and the next one is judged as ever


def test_the_program_never_holds_what_is_wanted(sandbox: Sandbox) -> None:
    problem = CodeProblem(name="s", entry_point="f", prompt="", solution="", cases=[((1,), "wanted-9431")])
    leak = (
        "import glob, sys\ndef f(x):\n    text = ''\n    for path in glob.glob('/box/*.*'):\n"
        "        text += open(path).read()\n"
        "    frame = sys._getframe()\n    while frame:\n        text += repr(frame.f_locals) + repr(frame.f_globals)\n"
        "        frame = frame.f_back\n    raise ValueError if 'wanted' + '-9431' in text else KeyError"
    )
    assert judge_program(leak, problem, sandbox) == ProgramVerdict(False, "it raises KeyError")


# ---- plain values

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda part: (
        st.lists(part)
        | st.lists(part).map(tuple)
        | st.sets(st.integers() | st.text(), max_size=1)  # larger ones have no order of their own
        | st.dictionaries(st.text() | st.integers(), part)
    ),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    again = loads(dumps(value))
    assert again == value and type(again) is type(value) and repr(again) == repr(value)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"list": 3}', '{"no": []}', '{"set": [{"list": []}]}', "[" * 99999])
def test_what_is_no_plain_value_is_refused(text: str) -> None:
    with pytest.raises(NotPlain):
        loads(text)
    with pytest.raises(NotPlain):
        dumps([object()])


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_many_values_of_one_hash_are_refused_before_they_are_compared(kind: str) -> None:
    def text(number: int) -> str:
        values: list[object] = [index * (2**61 - 1) for index in range(1, number + 1)]
        values = [[value, 0] for value in values] if kind == "dict" else values
        return json.dumps({kind: values})

    assert len(loads(text(100))) == 100
    began = time.process_time()
    with pytest.raises(NotPlain):
        loads(text(40_000))
    assert time.process_time() - began < 2  # the comparisons would take 10 s
    assert loads(dumps({*range(50_000)})) == {*range(50_000)}


# ---- the generator


@pytest.mark.parametrize("level", [1, 2, 3])
def test_problems_are_many_and_their_cases_tell_constants_apart(level: int) -> None:
    problems = [draw_problem(level, np.random.default_rng(seed)) for seed in range(200)]
    assert len({problem.prompt for problem in problems}) == 200
    assert len({problem.solution for problem in problems}) > 100
    for problem in problems:
        example_text = problem.prompt.split("\n\n")[-1]
        values = [repr(value) for _, value in problem.cases]
        assert len(values) >= 20 and max(map(values.count, values)) < len(values)
        assert not any(f"({arguments[0]!r}) returns" in example_text for arguments, _ in problem.cases)


# ---- the environment


def test_one_submission_ends_the_episode_and_more_may_be_asked_for() -> None:
    env = CodeTasks(submissions=2)
    env.reset(seed=0)
    assert submit(env, "x = ") == ("Wrong: it does not run: SyntaxError. Submissions left: 1.", 0.0, False)
    assert submit(env, env.problem.solution) == ("All hidden tests pass.", 1.0, True)
    env.close()
    env = CodeTasks()
    env.reset(seed=0)
    assert submit(env, f"def {env.problem.entry_point}(x): return None")[1:] == (0.0, True)
    env.close()


def test_a_program_is_tried_with_python_before() -> None:
    env = make_env("CodeTasks-v0", {"level": 3})
    env.reset(seed=1)
    assert env.step("python x = 41")[0] == "(no output)"
    assert env.step("python x + 1")[0] == "42"
    env.close()


def test_164_episodes_are_each_problem_of_humaneval_once() -> None:
    env = CodeTasks(level=4)
    seen = []
    for number in range(164):
        env.reset(seed=EVAL_SEED_START + number)
        seen.append(env.problem.name)
    assert len(set(seen)) == 164
    env.reset(seed=EVAL_SEED_START)
    assert env.problem.name == seen[0]
    env.reset()
    assert env.problem.name == seen[1]
    env.reset(options={"task": "HumanEval/17"})
    assert env.problem.entry_point == "parse_music"
    with pytest.raises(ConfigError, match="HumanEval/0 to HumanEval/163"):
        env.reset(options={"task": "17"})
    env.close()


def test_wrong_keywords_and_a_machine_without_a_sandbox_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="levels 1, 2, 3, 4; got level 5"):
        CodeTasks(level=5)
    with pytest.raises(ConfigError, match="submissions is at least 1"):
        CodeTasks(submissions=0)
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("agentgym.tools.code._sandboxes", {})
    with pytest.raises(
        SandboxError, match=r"CodeTasks-v0 runs programs, and no sandbox can be held here .*needs Linux"
    ):
        CodeTasks()


@pytest.mark.long
@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_oracle_and_cheat_over_several_tasks(level: int) -> None:
    env = make_env("CodeTasks-v0", {"level": level})
    for seed in range(16):
        for kind, expected in (("oracle", 1.0), ("cheat", 0.0)):
            observation, _ = env.reset(seed=seed)
            policy = policy_for(env, kind)
            policy.reset(env, observation, seed)
            total, ended = 0.0, False
            while not ended:
                reply = Action.from_message(policy.act(observation))
                observation, reward, terminated, truncated, info = env.step(reply)
                total, ended = total + reward, terminated or truncated
            assert (total, info["metrics"]["success"]) == (expected, expected)
    env.close()


@pytest.mark.slow
def test_every_solution_of_humaneval_passes_and_that_of_its_neighbour_does_not() -> None:
    problems = humaneval_problems()
    with open_sandbox(limits=SandboxLimits(time_limit_s=20.0, memory_mb=256)) as opened:
        for problem, neighbour in zip(problems, [*problems[1:], problems[0]], strict=True):
            assert judge_program(problem.solution, problem, opened).passed, problem.name
            alien = f"{neighbour.solution}\n{problem.entry_point} = {neighbour.entry_point}"
            assert not judge_program(alien, problem, opened).passed, problem.name
            assert not judge_program(f"def {problem.entry_point}(*given): return None", problem, opened).passed, (
                problem.name
            )


@pytest.mark.slow
def test_every_claim_of_the_card_holds() -> None:
    verdicts = {verdict.check: verdict for verdict in examine_env("CodeTasks-v0")}
    assert [verdict.findings for verdict in verdicts.values() if verdict.findings] == []
    assert {name for name, verdict in verdicts.items() if verdict.verdict == "not claimed"} == {"fork"}
