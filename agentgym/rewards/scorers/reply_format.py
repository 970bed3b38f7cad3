"""A scorer of a reply's form, whatever its content."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentgym.rewards.registry import REWARDS
from agentgym.rewards.reply import whole_reply
from agentgym.rewards.reward import Reward, UnusableReward
from agentgym.trajectory import Trajectory
from agentgym.types import Task

__all__ = ["format_score"]


@REWARDS.register("format")
def format_score(
    trajectory: Trajectory, task: Task, *, pattern: str = "", tags: Sequence[str] = (), score: float = 1.0
) -> Reward:
    """Returns `score` for a reply of the wanted form, otherwise 0; its reasoning is read in `<think>` marks.

    `pattern` is a regular expression that is searched for, in which a dot is any character. `tags` are names that
    each open and close exactly once, in sequence: `["think", "answer"]` for
    `<think>...</think>...<answer>...</answer>`. With both, the reply must satisfy both.
    """
    if not pattern and not tags:
        raise UnusableReward('the format reward needs the setting pattern or tags, such as tags=["think","answer"]')
    text = whole_reply(trajectory)
    good = _has_tags(text, tags) and (not pattern or re.search(pattern, text, re.DOTALL) is not None)
    return Reward(score if good else 0.0, success=good)


def _has_tags(text: str, tags: Sequence[str]) -> bool:
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    indices = [text.find(mark) for mark in marks]
    return all(text.count(mark) == 1 for mark in marks) and indices == sorted(indices)
