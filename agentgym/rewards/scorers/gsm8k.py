"""Grade-school mathematics: a number after `####`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from agentgym.rewards.registry import REWARDS
from agentgym.rewards.reply import ground_truth, last_reply
from agentgym.rewards.reward import InvalidReward, Reward
from agentgym.trajectory import Trajectory
from agentgym.types import JSON, Task

__all__ = ["gsm8k"]

NUMBER = r"-?(?:\\?\$)?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
MARKED = re.compile(rf"####\s+({NUMBER})")
ANY = re.compile(NUMBER)
END_CHARACTERS = 300
"""The end of a reply that is read."""


@REWARDS.register("gsm8k")
def gsm8k(
    trajectory: Trajectory,
    task: Task,
    *,
    method: Literal["strict", "flexible"] = "strict",
    score: float = 1.0,
    format_score: float = 0.0,
) -> Reward:
    """`score` for the right number, `format_score` for a wrong one, 0 for none.

    `strict` reads the last number after `#### `, `flexible` the last number of the reply; both in its last 300
    characters. The ground truth is the number, or an answer of GSM8K with `####` in it.

    Differences from verl: numbers are compared as numbers (`72.00` and `72.` are 72), a dollar sign may stand before
    the number, and before or after its minus.
    """
    truth = _truth(ground_truth(task))
    found = (MARKED if method == "strict" else ANY).findall(last_reply(trajectory)[-END_CHARACTERS:])
    if not found:
        return Reward(0.0, success=False)
    right = _number(found[-1]) == truth
    return Reward(score if right else format_score, success=right)


def _truth(value: JSON) -> Decimal:
    text = str(value).strip()
    found = MARKED.findall(text) if "####" in text else ANY.findall(text)[:1] if ANY.fullmatch(text) else []
    if not found:
        raise InvalidReward(
            f"the ground truth of gsm8k is a number, or an answer with one after '#### '; got {value!r:.80}"
        )
    return _number(found[-1])


def _number(text: str) -> Decimal:
    return Decimal(re.sub(r"[,$\\]", "", text))
