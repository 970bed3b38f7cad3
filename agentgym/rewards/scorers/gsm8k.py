"""A scorer of grade-school mathematics: a number after `####`."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from agentgym.envs.tasks.math.final_number import last_number, marked_number, read_number
from agentgym.rewards.registry import REWARDS
from agentgym.rewards.reply import ground_truth, last_reply
from agentgym.rewards.reward import InvalidReward, Reward
from agentgym.trajectory import Trajectory
from agentgym.types import JSON, Task

__all__ = ["gsm8k"]

END_CHARACTERS = 300
"""The number of characters that are read at the end of a reply."""


@REWARDS.register("gsm8k")
def gsm8k(
    trajectory: Trajectory,
    task: Task,
    *,
    method: Literal["strict", "flexible"] = "strict",
    score: float = 1.0,
    format_score: float = 0.0,
) -> Reward:
    """Returns `score` for the right number, `format_score` for a wrong one, 0 for none.

    `strict` reads the last number after `#### `, `flexible` the last number of the reply; both in its last 300
    characters. The ground truth is the number, or an answer of GSM8K that contains `####`.

    Differences from verl: numbers are compared as numbers, and read by `agentgym.envs.tasks.math.final_number`
    (`72.00`, `72.` and `$72` are 72; a sum that is not evaluated is not an answer).
    """
    truth = _truth(ground_truth(task))
    answer = (marked_number if method == "strict" else last_number)(last_reply(trajectory)[-END_CHARACTERS:])
    if answer is None:
        return Reward(0.0, success=False)
    right = answer == truth
    return Reward(score if right else format_score, success=right)


def _truth(value: JSON) -> Fraction:
    text = str(value)
    number = marked_number(text) if "####" in text else read_number(text)
    if number is None:
        raise InvalidReward(
            f"the ground truth of gsm8k is a number, or an answer with one after '#### '; got {value!r:.80}"
        )
    return number
