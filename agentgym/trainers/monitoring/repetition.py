"""How much a step's replies repeat themselves; linear in the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentgym.trajectory import Group, Source, Trajectory

__all__ = ["NGRAM", "Repetition", "repeated_ngrams"]

NGRAM = 4
"""Tokens of an n-gram."""


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Three ways to say the same again, each a share from 0 (never) to 1, over what was sampled in a step."""

    repeated_ngrams: float
    """Within a reply: the share of its runs of 4 tokens that it held before, see `repeated_ngrams`."""
    repeated_replies: float
    """Within an episode: the share of its replies, the first one aside, that equal an earlier one to the id."""
    identical_episodes: float
    """Within a group: 0 when no two members sampled the same ids, 1 when all members did: (members - distinct
    episodes) / (members - 1), summed above and below over the groups."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Repetition:
        """The repetition in the episodes that have a reward."""
        kept = [[one for one in group.trajectories if one.status.trainable and one.rows] for group in groups]
        episodes = [[_replies(one) for one in group] for group in kept]
        replies = [replies for group in episodes for replies in group]
        return cls(
            repeated_ngrams=repeated_ngrams(reply for each in replies for reply in each),
            repeated_replies=_share(replies),
            identical_episodes=_share(episodes),
        )


def repeated_ngrams(replies: Iterable[Sequence[int]], n: int = NGRAM) -> float:
    """The share of n-grams that their reply held before; 0 where no reply has n tokens.

    A reply's own share is seq-rep-n, `1 - distinct n-grams / n-grams` (Welleck et al. 2020, "Neural Text Generation
    with Unlikelihood Training", section 3). They average it over replies; here the counts are summed first, so that one
    long loop is not hidden by many short replies.

    Example: `repeated_ngrams([(1, 2, 1, 2, 1)], n=2)` is 0.5, for (1, 2) and (2, 1) come twice each.
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
    """Of the members of all collections, without one of each, those that are there before."""
    pairs = [(len(each) - len(set(each)), len(each) - 1) for each in collections if len(each) > 1]
    others = sum(count for _, count in pairs)
    return sum(repeated for repeated, _ in pairs) / others if others else 0.0
