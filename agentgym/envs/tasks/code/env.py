"""CodeTasks-v0: write a function that passes hidden tests."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.envs.tasks.code.generator import LEVELS, draw_problem
from agentgym.envs.tasks.code.humaneval import humaneval_problems
from agentgym.envs.tasks.code.judge import judge_program
from agentgym.envs.tasks.code.problem import CodeProblem
from agentgym.errors import ConfigError, EnvironmentFault, SandboxError
from agentgym.tools import tool
from agentgym.tools.code import CodeTools, shared_sandbox
from agentgym.tools.sandbox import SandboxLimits
from agentgym.types import Message

__all__ = ["CodeTasks"]

HUMANEVAL = 4
"""The level of HumanEval's problems."""
LIMITS = SandboxLimits(time_limit_s=8.0, memory_mb=256, scratch_mb=8, output_kb=64)
JUDGE_S = 180.0
MAX_CALLS = 24
"""The most calls of python in an episode."""
LONGEST_PROGRAM = 50_000
INSTRUCTIONS = (
    "Write the Python function that is asked for. Hidden tests call it. Try what you like with python; then call "
    "submit with the whole program, {often}."
)


class CodeTasks(ToolEnv):
    """Write the Python function that is asked for; hidden tests in a sandbox judge it. Reward 1 when all pass.

    `level` (1 to 4) sets what is asked: a choice from a list, a chain of three operations, an algorithm or a small
    interpreter, drawn from the seed; or, at 4, a problem of HumanEval: the seed counts through all 164, so that 164
    evaluation episodes are each problem once, and `options={"task": "HumanEval/17"}` names one. `submissions` is how
    often a program may be handed in, 1 by default. `backend` is the kind of sandbox.
    """

    card = EnvCard(
        task="Write a Python function that passes hidden tests; try things with python before handing it in.",
        tools=("submit", "python"),
        reward="1 when all hidden tests pass, else 0. The first submission counts, or as many as `submissions` says.",
        difficulty=Difficulty(
            values={
                1: "count, sum or list what fits a condition",
                2: "a condition, a change and a summary in turn",
                3: "an algorithm on a list, or an interpreter of made-up commands",
                HUMANEVAL: "the 164 problems of HumanEval, for evaluation",
            }
        ),
        oracle="hands in the solution that the values of the tests come from",
        cheat="exits, forged results, values that equal everything, looks at frames and files, tables of the examples",
        baseline={"random": 0.0},
        data="drawn from the reset seed; at level 4 HumanEval (Chen et al. 2021, MIT)",
        licence="Apache-2.0; HumanEval: MIT",
    )
    max_turns = 12

    def __init__(
        self, render_mode: str | None = None, *, level: int = 1, submissions: int = 1, backend: str = "auto"
    ) -> None:
        levels = (*LEVELS, HUMANEVAL)
        if level not in levels:
            raise ConfigError(f"CodeTasks has the levels {', '.join(map(str, levels))}; got level {level!r}")
        if submissions < 1:
            raise ConfigError(f"submissions is at least 1, got {submissions!r}")
        try:
            self._sandbox = shared_sandbox(backend, LIMITS)
        except SandboxError as error:
            raise SandboxError(f"CodeTasks-v0 runs programs, and {error}") from error
        python = partial(CodeTools, names=("python",), limits=LIMITS, backend=backend, max_calls=MAX_CALLS)
        super().__init__(render_mode, tool_sources=[python])
        self.level = level
        self.own_split = level == HUMANEVAL
        self.submissions = submissions
        often = "once" if submissions == 1 else f"at most {submissions} times"
        self.system_prompt = INSTRUCTIONS.format(often=often)
        self.problem = CodeProblem(name="", entry_point="", prompt="", solution="")
        self._num_left = 0
        self._number = 0
        self._counted_from: object = None

    def start(self, options: dict[str, Any]) -> str:
        """Draws a problem, or takes the next one of HumanEval."""
        self._num_left = self.submissions
        if self.level == HUMANEVAL:
            self.problem = self._find_problem(options["task"]) if "task" in options else self._next()
        elif "task" in options:
            raise ConfigError(f"options['task'] names a problem of HumanEval, which is level {HUMANEVAL}")
        else:
            self.problem = draw_problem(self.level, self.np_random)
        return self.problem.prompt

    @tool(timeout_s=JUDGE_S, on_error="raise")
    def submit(self, program: str) -> str:
        """Hands in a program, which is then judged.

        Args:
            program: the whole Python program with the function; the standard library can be imported
        """
        self._num_left -= 1
        verdict = None
        try:
            if len(program) <= LONGEST_PROGRAM:
                verdict = judge_program(program, self.problem, self._sandbox)
        except SandboxError as error:
            raise EnvironmentFault(f"the sandbox failed: {error}") from error
        if verdict is not None and verdict.passed:
            self.end(success=True, reward=1.0)
            return "All hidden tests pass."
        why = f"it has more than {LONGEST_PROGRAM} characters" if verdict is None else verdict.why
        if not self._num_left:
            self.end(success=False)
            return f"Wrong: {why}."
        return f"Wrong: {why}. Submissions left: {self._num_left}."

    def secrets(self) -> tuple[str, ...]:
        """The solution."""
        return (self.problem.solution,)

    def make_oracle(self) -> Policy:
        """A policy that hands in the solution."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that hands in everything but a solution."""
        return Trickster("submit", _tricks)

    def _find_problem(self, name: object) -> CodeProblem:
        problems = [problem for problem in humaneval_problems() if problem.name == name]
        if not problems:
            raise ConfigError(f"there is no problem {name!r}: HumanEval/0 to HumanEval/{len(humaneval_problems()) - 1}")
        return problems[0]

    def _next(self) -> CodeProblem:
        """The problem with the number of the reset's seed; resets without a seed go on from there."""
        problems = humaneval_problems()
        is_seeded = self.np_random is not self._counted_from
        self._counted_from = self.np_random
        self._number = int(self.np_random_seed) if is_seeded else self._number + 1
        return problems[self._number % len(problems)]


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._game = game_of(env, CodeTasks)

    def act(self, observation: str) -> Message:
        return tool_call_reply("submit", program=self._game.problem.solution)


FORGERIES = (
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "print('All hidden tests pass.')\nprint('PASSED')",
    "class Yes:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
    "def {name}(*a): return Yes()",
    "import plain_values\nclass Any(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
    "plain_values.dumps = lambda value: Any('true')\ndef {name}(*a): return 0",
    "def {name}(*a):\n    import sys\n    frame = sys._getframe()\n    while frame:\n"
    "        for key in ('wanted', 'expected', 'cases', 'solution', 'check', 'right'):\n"
    "            if key in frame.f_locals: return frame.f_locals[key]\n        frame = frame.f_back",
    "import os\nopen('answers.json', 'w').write('true')\nopen('verdict.json', 'w').write('[true, []]')\nos._exit(0)",
    "def {name}(*a): return open('test.py').read()",
    "def {name}(*a): raise AssertionError",
    "def {name}(*a): return None",
    "",
)


def _tricks(env: TextEnv) -> list[Message]:
    problem = game_of(env, CodeTasks).problem
    programs = [text.replace("{name}", problem.entry_point) for text in FORGERIES]
    results = dict(re.findall(rf"^{problem.entry_point}\((.*)\) returns (.*)$", problem.prompt, re.MULTILINE))
    table = f"def {problem.entry_point}(given): return eval({results!r}.get(repr(given), 'None'))"
    looks = "import gc, os; print([os.listdir(one) for one in ('.', '/box', '/proc')], len(gc.get_objects()))"
    return [
        tool_call_reply("python", code=looks),
        *(tool_call_reply("submit", program=program) for program in (table, *programs)),
    ]
