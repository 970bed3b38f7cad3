"""Scorers of short answers in words, compared as in SQuAD."""

from __future__ import annotations

import re
import string
from collections import Counter

from agentgym.rewards.registry import REWARDS
from agentgym.rewards.reply import ground_truth, last_reply
from agentgym.rewards.reward import InvalidReward, Reward
from agentgym.trajectory import Trajectory
from agentgym.types import Task

__all__ = ["exact_match", "f1"]

ARTICLE = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@REWARDS.register("exact_match")
def exact_match(trajectory: Trajectory, task: Task, *, tag: str = "") -> Reward:
    """Returns 1 if the normalized reply is one of the ground truths (a text or a list of them), otherwise 0.

    Normalized as by Rajpurkar et al. 2016 (SQuAD): lower case, without punctuation, articles and extra spaces. With
    `tag`, the answer is the content of the last `<tag>...</tag>`; a reply without it scores 0.
    """
    reply = _answer(trajectory, tag)
    right = reply is not None and any(_normalize_text(reply) == _normalize_text(truth) for truth in _truths(task))
    return Reward(float(right), success=right)


@REWARDS.register("f1")
def f1(trajectory: Trajectory, task: Task, *, tag: str = "") -> Reward:
    """Returns the harmonic mean of precision and recall of the normalized words, the best over the ground truths.

    Normalization and `tag` are as in `exact_match`. Success is an exact match. Two answers without a word are equal.
    """
    reply = _answer(trajectory, tag)
    if reply is None:
        return Reward(0.0, success=False)
    best = max(_overlap(_normalize_text(reply).split(), _normalize_text(truth).split()) for truth in _truths(task))
    exact = any(_normalize_text(reply) == _normalize_text(truth) for truth in _truths(task))
    return Reward(best, success=exact)


def _answer(trajectory: Trajectory, tag: str) -> str | None:
    text = last_reply(trajectory)
    if not tag:
        return text
    _, opened, tail = text.rpartition(f"<{tag}>")
    inner, closed, _ = tail.partition(f"</{tag}>")
    return inner if opened and closed else None


def _truths(task: Task) -> list[str]:
    truth = ground_truth(task)
    truths = (
        [truth]
        if isinstance(truth, (str, int, float))
        else list(truth or ())
        if isinstance(truth, list | tuple)
        else []
    )
    if not truths or not all(isinstance(answer, (str, int, float)) for answer in truths):
        raise InvalidReward(f"the ground truth is a text or a list of them, got {truth!r:.80}")
    return [str(answer) for answer in truths]


def _normalize_text(text: str) -> str:
    return " ".join(ARTICLE.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def _overlap(answer: list[str], true: list[str]) -> float:
    if not answer or not true:
        return float(answer == true)
    shared = sum((Counter(answer) & Counter(true)).values())
    return 2 * shared / (len(answer) + len(true))
