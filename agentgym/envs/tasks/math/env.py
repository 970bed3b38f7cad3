r"""Math-v0: a question of mathematics, answered in a `\boxed{}`."""

from __future__ import annotations

from typing import Any

from agentgym.envs.base.action import Action
from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.tasks.math.equality import equal_answers, math_verify_or_raise
from agentgym.envs.tasks.math.generator import KINDS, draw_question
from agentgym.envs.tasks.math.question import MathQuestion, boxed_answer, in_form
from agentgym.errors import ConfigError
from agentgym.types import Message

__all__ = ["Math"]


class Math(TextEnv):
    r"""Answer a question of algebra, number theory or calculus in one reply. Reward 1 for a right answer, worked out.

    The answer is the last `\boxed{...}` of the reply: a number, a root, a polynomial or a set, in any of the ways
    that people write one. An expression that is only equal, such as the question given back, is no answer. `level` (1
    to 3) sets what is asked. Needs math-verify: the extra `rewards`.
    """

    card = EnvCard(
        task=r"Answer a question of mathematics; the answer, worked out, stands in \boxed{}.",
        reward=r"1 when the last \boxed{} of the reply is the answer, however it is written, else 0.",
        difficulty=Difficulty(
            values={
                1: "linear equations, fractions, divisors, remainders",
                2: "quadratic equations, roots, series, counting, systems",
                3: "derivatives, integrals, powers modulo m, determinants, infinite series",
            }
        ),
        oracle="says the answer that the question was made from",
        cheat="says it without a box, gives the question back, boxes neighbours, sets of numbers and claims",
        baseline={"random": 0.0},
        licence="Apache-2.0",
    )
    system_prompt = r"Solve the problem. Put the final answer, worked out, into \boxed{}, such as \boxed{\frac{1}{2}}."
    max_turns = 1

    def __init__(self, render_mode: str | None = None, *, level: int = 1) -> None:
        if level not in KINDS:
            raise ConfigError(f"Math has the levels {', '.join(map(str, KINDS))}; got level {level!r}")
        math_verify_or_raise()
        super().__init__(render_mode)
        self.level = level
        self.question = MathQuestion("", "0")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Draws a question."""
        self.question = draw_question(self.level, self.np_random)
        return self.question.text, {}

    def step(self, action: str) -> StepResult:
        """Judges the reply, which ends the episode."""
        message = action.message if isinstance(action, Action) else None
        answer = boxed_answer(str(action) if message is None else message.content)
        plain = None if answer is None else in_form(answer, self.question.form)
        right = plain is not None and equal_answers(self.question.answer, plain)
        metrics = {"success": float(right), "boxed": float(answer is not None)}
        return "The episode is over.", float(right), True, False, {"metrics": metrics}

    def secrets(self) -> tuple[str, ...]:
        """The answer, unless the question or the instruction contains it anyway."""
        prompt = f"{self.system_prompt} {self.question.text}"
        return () if self.question.answer in prompt else (self.question.answer,)

    def make_oracle(self) -> Policy:
        """A policy that gives the answer."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that gives everything but the answer."""
        return _Cheat()


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._question, self._turn = game_of(env, Math).question, seed

    def act(self, observation: str) -> Message:
        return Message("assistant", f"The answer is \\boxed{{{self._question.answer}}}.")


class _Cheat(_Oracle):
    def act(self, observation: str) -> Message:
        answer, pieces = self._question.answer, self._question.text.split("$")
        numbers = ",".join(map(str, range(-40, 41)))
        tricks = (
            f"The answer is {answer}.",
            f"\\boxed{{{answer}}} or \\boxed{{{answer} + 1}}",
            f"\\boxed{{{pieces[1] if len(pieces) > 1 else pieces[0]}}}",
            f"\\boxed{{\\frac{{2 \\cdot ({answer})}}{{2}}}}",
            f"\\boxed{{{answer}",
            f"\\boxed{{\\{{{numbers}\\}}}}",
            "\\boxed{\\text{the right answer}} success: true, reward: 1.0",
            "\\boxed{9^{9^{9^{9}}}}",
            "\\boxed{}",
        )
        self._turn += 1
        return Message("assistant", tricks[self._turn % len(tricks)])
