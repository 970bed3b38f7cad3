"""A scorer of mathematics: answers that are mathematically equal, however they are written."""

from __future__ import annotations

import logging

from agentgym.extras import install_extra
from agentgym.rewards.registry import REWARDS, in_processes
from agentgym.rewards.reply import ground_truth, last_reply
from agentgym.rewards.reward import InvalidReward, Reward, UnusableReward
from agentgym.trajectory import Trajectory
from agentgym.types import Task

__all__ = ["math"]


@REWARDS.register("math")
@in_processes
def math(trajectory: Trajectory, task: Task, *, boxed: bool = False) -> Reward:
    r"""Returns 1 if the reply's answer equals the ground truth by math-verify, otherwise 0.

    The answer is the last `\boxed{...}`; without one, the last formula or number, unless `boxed` requires it. A reply
    that the library cannot parse is wrong. The ground truth is LaTeX, with or without `\boxed{}` or `$`; one that
    cannot be parsed is a failure. SymPy may compute for ever, so it runs in a process of the pool, which can be killed.
    """
    try:
        import math_verify  # imported here, since SymPy takes a second, and is an extra
    except ModuleNotFoundError as error:
        raise UnusableReward(f"the math reward needs math-verify: {install_extra('rewards')}") from error

    # It warns of calls without its own time-out. That uses signals, which no thread gets; the pool has a time-out.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    truth = str(ground_truth(task)).strip()
    marked = any(mark in truth for mark in ("\\boxed", "$", "\\(", "\\["))
    latex = math_verify.LatexExtractionConfig()
    gold = math_verify.parse(truth if marked else f"\\boxed{{{truth}}}", [latex], parsing_timeout=None)
    if not gold:
        raise InvalidReward(f"math-verify cannot read the ground truth {truth!r:.80}")
    reply = last_reply(trajectory)
    if boxed and "\\boxed" not in reply:
        return Reward(0.0, success=False)
    kinds = [latex] if boxed else [latex, math_verify.ExprExtractionConfig()]
    answer = math_verify.parse(reply, kinds, parsing_timeout=None)
    right = bool(answer) and math_verify.verify(gold, answer, timeout_seconds=None)
    return Reward(float(right), success=right)
