"""Measures how much a step's replies repeat themselves, in time linear in the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentgym.trajectory import Group, Source, Trajectory

__all__ = ["NGRAM", "Repetition", "repeated_ngrams"]

NGRAM = 4
"""The number of tokens of an n-gram."""


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Three kinds of repetition, each a share from 0 (never) to 1, over what was sampled in a step."""

    repeated_ngrams: float
    """Within a reply: the share of its 4-grams that occur in it before, see `repeated_ngrams`."""
    repeated_replies: float
    """Within an episode: the share of its replies, without the first, that have the same ids as an earlier one."""
    identical_episodes: float
    """Within a group: 0 when no two members sampled the same ids, 1 when all members did: (members - distinct
    episodes) / (members - 1), numerators and denominators summed over the groups."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Repetition:
        """Measures the repetition in the episodes that have a reward."""
        trainable = [
            [trajectory for trajectory in group.trajectories if trajectory.status.trainable and trajectory.rows]
            for group in groups
        ]
        episodes = [[_replies(trajectory) for trajectory in group] for group in trainable]
        replies = [replies for group in episodes for replies in group]
        return cls(
            repeated_ngrams=repeated_ngrams(reply for each in replies for reply in each),
            repeated_replies=_share(replies),
            identical_episodes=_share(episodes),
        )


def repeated_ngrams(replies: Iterable[Sequence[int]], n: int = NGRAM) -> float:
    """Returns the share of n-grams that occur in their reply before; 0 if no reply has n tokens.

    A reply's own share is seq-rep-n, `1 - distinct n-grams / n-grams` (Welleck et al. 2020, "Neural Text Generation
    with Unlikelihood Training", section 3). They average it over replies; here the counts are summed first, so that one
    long loop is not hidden by many short replies.

    Example: `repeated_ngrams([(1, 2, 1, 2, 1)], n=2)` is 0.5, as (1, 2) and (2, 1) occur twice each.
    """
    total = repeated = 0
    for ids in replies:
        grams = max(0, len(ids) - n + 1)
        total += grams
        repeated += grams - len(set(zip(*(ids[start : start + grams] for start in range(n)), strict=True)))
    return repeated / total if total else 0.0


def _replies(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
    return tuple(span.ids for row in trajectory.rows for span in row.spans if span.source is Source.POLICY)


def _share(collections: Iterable[Sequence[object]]) -> float:
    """Returns the share of repeated members, over all collections and without the first member of each."""
    pairs = [(len(each) - len(set(each)), len(each) - 1) for each in collections if len(each) > 1]
    others = sum(count for _, count in pairs)
    return sum(repeated for repeated, _ in pairs) / others if others else 0.0
