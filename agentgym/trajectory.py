"""The record of an episode: spans of token ids with their provenance, turns, rows, trajectories, groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from agentgym.errors import InvalidTrajectory
from agentgym.notebook.html_view import html_table, short_text
from agentgym.notebook.speaker_rows import speaker_rows
from agentgym.openai_wire import message_to_openai
from agentgym.routed_experts import RoutedExperts
from agentgym.types import JSON, Message, Status, StopReason, Task, ToolResult, ToolSpec

__all__ = [
    "BRANCH_LABELS",
    "MAX_REWARD",
    "Group",
    "Row",
    "RowOrigin",
    "Source",
    "Status",
    "StopReason",
    "TokenSpan",
    "Trajectory",
    "Turn",
    "is_reward",
    "shortest_floats",
]

BRANCH_LABELS = ("main", "sub-agent", "fork", "side", "summary", "title")
"""The kinds of the branches of a served episode."""
MAX_REWARD = 1e100
"""The largest reward: sums and squares of rewards stay finite."""


def is_reward(value: object) -> bool:
    """True if `value` is a number from -MAX_REWARD to MAX_REWARD; a bool is one, and numpy's too."""
    try:
        return isinstance(value, (Real, np.bool_)) and abs(float(value)) <= MAX_REWARD
    except OverflowError:  # an integer that no float holds
        return False


class Source(StrEnum):
    """The origin of a token id; only POLICY ids are ever trained."""

    PROMPT = "prompt"  # the first render of a row
    POLICY = "policy"  # emitted by the engine, the sampled end token included
    ENV = "env"  # appended after a reply: the template's glue, tool results, observations


def shortest_floats(values: Sequence[float] | NDArray[np.float32]) -> tuple[float, ...]:
    """Returns the numbers with the fewest digits that are equal as fp32, so that their text is half as long.

    >>> shortest_floats([-0.10000000149011612])
    (-0.1,)
    """
    return tuple(map(float, np.asarray(values, np.float32).astype("U16").tolist()))


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A run of token ids from one source.

    A POLICY span has one logprob (fp32, of the distribution that was sampled, natural logarithm, at most 0) and
    one policy version per id; other spans have neither. The loss mask is `is_trained` and nothing else.

    Example: `TokenSpan((7, 8), Source.POLICY, logprobs=(-0.1, -2.3), policy_versions=(3, 3))`.
    """

    ids: tuple[int, ...]
    source: Source
    logprobs: tuple[float, ...] | None = None
    policy_versions: tuple[int, ...] | None = None
    experts: RoutedExperts | None = None
    """The experts of a mixture that computed the tokens before the span's last one, which no span before has; `start`
    counts in the row. None unless the engine records them."""
    excluded: str = ""
    """The reason why sampled ids are kept out of the loss on purpose: `summary`, where summaries are not trained,
    `constrained`, `unused` (the agent went on with another sample of the same request), `unseen` (it closed its
    connection before the reply), or the label of the row's branch, where that has no credit; empty if they are
    trained."""

    @property
    def is_trained(self) -> bool:
        """True if the engine emitted the ids and the loss counts them."""
        return self.source is Source.POLICY and not self.excluded

    def __post_init__(self) -> None:
        if self.ids and min(self.ids) < 0:
            raise InvalidTrajectory(f"token ids are non-negative integers, got {min(self.ids)}")
        if self.source is not Source.POLICY:
            if self.logprobs is not None or self.policy_versions is not None:
                raise InvalidTrajectory(f"a {self.source} span was not sampled: it has no logprobs and no versions")
            if self.experts is not None:
                raise InvalidTrajectory(f"a {self.source} span was not sampled: it has no experts")
            if self.excluded:
                raise InvalidTrajectory(f"a {self.source} span is in no loss that it could be excluded from")
            return
        for name, values in (("logprobs", self.logprobs), ("policy_versions", self.policy_versions)):
            if values is None or len(values) != len(self.ids):
                have = "none" if values is None else str(len(values))
                raise InvalidTrajectory(f"a policy span of {len(self.ids)} ids needs as many {name}, got {have}")
        assert self.logprobs is not None and self.policy_versions is not None
        if not self.ids:
            raise InvalidTrajectory("a policy span holds at least one sampled id")
        if not _are_logprobs(self.logprobs):
            raise InvalidTrajectory("logprobs are finite and at most 0")
        if not _never_falls(self.policy_versions):
            raise InvalidTrajectory("policy versions never fall within a span")


def _are_logprobs(values: Sequence[float]) -> bool:
    """Returns True if all are finite and at most 0, but for rounding; a finite sum has no part that is not finite."""
    if math.isfinite(sum(values)) and max(values) <= 1e-6:
        return True
    return all(math.isfinite(value) and value <= 1e-6 for value in values)


def _never_falls(values: Sequence[int]) -> bool:
    return values.count(values[0]) == len(values) or all(earlier <= later for earlier, later in pairwise(values))


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """The place where a row of a served episode begins: in another row, which it forks, or nowhere.

    A fork's prompt is the ids of the row `row` up to the reply of the turn `turn`, all of them untrained there, and the
    render of the messages after the first `num_shared`. Example: `RowOrigin("fork", row=0, turn=2, num_shared=6)`.
    """

    label: str = ""
    """The kind of the branch, one of BRANCH_LABELS."""
    row: int | None = None
    """The row that is forked; None for a row that has its own render of its messages."""
    turn: int | None = None
    """The turn, counted over the episode, whose reply is the last that both rows have; None if they share only the
    prompt."""
    num_shared: int = 0
    """The number of messages that both rows have."""
    client: str = ""
    """The dialect of the branch's first request, and the program that sent it: `responses codex_exec/0.171.0`."""


@dataclass(frozen=True)
class Row:
    """One training sequence: spans in the order the model saw them; arrays are derived, each of length `T`."""

    spans: tuple[TokenSpan, ...]
    messages: tuple[Message, ...] | None = field(default=None, hash=False)
    """The messages that the prompt was rendered from; None if unknown."""
    tools: tuple[ToolSpec, ...] | None = field(default=None, hash=False)
    """The tools that the model was shown; None if unknown."""
    origin: RowOrigin | None = field(default=None, hash=False)
    """The branch of a served episode that the row is; None for the row of a conversation that we lead."""

    def __post_init__(self) -> None:
        if not self.spans or self.spans[0].source is not Source.PROMPT or not self.spans[0].ids:
            raise InvalidTrajectory("a row begins with a non-empty prompt span")
        if any(span.source is Source.PROMPT for span in self.spans[1:]):
            raise InvalidTrajectory("only the first span of a row is a prompt span")

    def __repr__(self) -> str:
        return f"<Row: {len(self.spans)} spans, {len(self)} tokens, {self.num_trained_tokens} trained>"

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Token ids, `[T]`."""
        return np.fromiter((i for span in self.spans for i in span.ids), np.int64)

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """True where the engine emitted the id and the loss counts it, `[T]`."""
        return np.concatenate([np.full(len(span.ids), span.is_trained) for span in self.spans])

    @cached_property
    def sampled_mask(self) -> NDArray[np.bool_]:
        """True where the engine emitted the id, `[T]`; the mask, unless spans are excluded."""
        return np.concatenate([np.full(len(span.ids), span.source is Source.POLICY) for span in self.spans])

    @cached_property
    def logprobs(self) -> NDArray[np.float32]:
        """The sampled logprob at POLICY ids, 0 elsewhere, `[T]`."""
        return np.concatenate([np.asarray(s.logprobs or (0.0,) * len(s.ids), np.float32) for s in self.spans])

    @cached_property
    def policy_versions(self) -> NDArray[np.int64]:
        """The policy version at POLICY ids, -1 elsewhere, `[T]`."""
        return np.concatenate([np.asarray(s.policy_versions or (-1,) * len(s.ids), np.int64) for s in self.spans])

    @cached_property
    def reply_versions(self) -> NDArray[np.int64]:
        """The policy version that the id's reply began with, -1 outside of replies, `[T]`."""
        parts = [np.full(len(s.ids), s.policy_versions[0] if s.policy_versions else -1, np.int64) for s in self.spans]
        return np.concatenate(parts)

    @cached_property
    def experts_TRK(self) -> NDArray[np.int16] | None:
        """The experts that each of R routers gave the id to, `[T, R, K]`, -1 if not known; None without any record."""
        parts = [span.experts for span in self.spans if span.experts is not None]
        if not parts:
            return None
        experts_TRK = np.full((len(self), parts[0].num_routers, parts[0].num_chosen), -1, np.int16)
        for part in parts:
            experts_TRK[part.start : part.stop] = part.experts_TRK
        return experts_TRK

    @cached_property
    def num_trained_tokens(self) -> int:
        """The number of trained ids of the row."""
        return sum(len(span.ids) for span in self.spans if span.is_trained)

    def __len__(self) -> int:
        return sum(len(span.ids) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Turn:
    """One model reply with its answer."""

    message: Message
    """The reply as parsed, malformed calls kept."""
    reward: float | None
    """The environment's reward for this turn; None where the environment gave none (it failed)."""
    observation: str = ""
    """The text that answered the reply."""
    tool_results: tuple[ToolResult, ...] = ()
    """One result per call id, in call order."""
    finish_reason: str = "stop"
    """`stop` (an end token or a stop string was sampled), `length` or `abort`."""
    asked: str = ""
    """The rollout's own request before this reply: that for a summary; empty where the environment asked. Such a turn
    has no answer, and its reward is 0."""
    messages: tuple[Message, ...] | None = None
    """The messages shown to the model as the answer, if they are neither the results nor the observation (nor both)."""
    stop: str = ""
    """The stop string that ended the reply, which the last of its ids completes; empty if something else did."""
    order: int | None = None
    """The position of the reply among all of the episode in time, where it is not the turn's own: turns are sorted by
    row, and branches of a served episode are sampled side by side."""
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Seconds: `generate_s`, `env_s`. Wall-clock, so never part of equality and not stored in `episodes.jsonl`."""


@dataclass(frozen=True)
class Trajectory:
    """The record of one episode, by one trained agent.

    Every POLICY span belongs to exactly one turn, in order. Only an episode that was played through a chat endpoint
    which returns no token ids, or recorded `without_ids`, has turns and no rows (`has_ids` is false); it cannot be
    trained on. `reward` is the sum
    of the turns' rewards, and None when the status is not trainable. `metrics` are numbers of the episode (the
    environment's `info["metrics"]`, `success` among them).
    """

    task: Task
    group: str
    member: int
    rows: tuple[Row, ...]
    turns: tuple[Turn, ...]
    status: Status
    stop_reason: StopReason
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    """One line naming the failure of a non-trainable episode; None otherwise."""
    info: Mapping[str, JSON] = field(default_factory=dict)
    """JSON-able extras of the record: final environment info a viewer may show."""

    def __post_init__(self) -> None:
        if self.stop_reason not in self.status.reasons:
            raise InvalidTrajectory(f"status {self.status} does not stop for the reason {self.stop_reason}")
        num_replies = sum(span.source is Source.POLICY for row in self.rows for span in row.spans)
        if num_replies != len(self.turns) and self.has_ids:
            raise InvalidTrajectory(f"{len(self.turns)} turns need as many policy spans, got {num_replies}")
        if not self.status.trainable:
            if self.error is None:
                raise InvalidTrajectory(f"a trajectory that ended as {self.status} says why in `error`")
            return
        if not self.turns:
            raise InvalidTrajectory(f"a {self.status} trajectory has at least one turn")
        if any(turn.reward is None or not math.isfinite(turn.reward) for turn in self.turns):
            raise InvalidTrajectory(f"a {self.status} trajectory has a finite reward on every turn")

    def __repr__(self) -> str:
        """One line: the tokens themselves are in `rows`."""
        earned = f"reward {self.reward:g}" if self.reward is not None else f"no reward ({self.error})"
        who = f"{self.group}/{self.member} of {self.task.env_id} (seed {self.task.seed})"
        size = f"{len(self.turns)} turns, {len(self.rows)} rows, {self.num_tokens} tokens"
        return short_text(f"<Trajectory {who}: {self.status}, {earned}, {size}, {self.num_trained_tokens} trained>")

    def _repr_html_(self) -> str:
        """Returns the conversation as a table."""
        opening = self.rows[0].messages or () if self.rows else ()
        return html_table(repr(self), speaker_rows(opening, self.turns))

    @property
    def has_ids(self) -> bool:
        """True if the exact ids of the replies are stored, as training needs them."""
        return bool(self.rows) or not self.turns

    @property
    def by_time(self) -> list[int]:
        """The numbers of the turns in the order in which their replies were sampled."""
        orders = [index if turn.order is None else turn.order for index, turn in enumerate(self.turns)]
        return sorted(range(len(orders)), key=orders.__getitem__)

    def without_ids(self) -> Trajectory:
        """Returns the episode without its rows: `metrics` has the numbers of tokens, `info` the first messages."""
        if not self.rows:
            return self
        num_sampled = sum(self.reply_tokens)
        counts = {"prompt_tokens": self.num_tokens - num_sampled, "completion_tokens": num_sampled}
        info = {**self.info, "ids_left_out": {"opening": [*map(message_to_openai, self.rows[0].messages or ())]}}
        return replace(self, rows=(), metrics={**self.metrics, **counts}, info=info)

    @property
    def reward(self) -> float | None:
        """The episode's return (undiscounted), or None when the episode failed."""
        if not self.status.trainable:
            return None
        return math.fsum(turn.reward for turn in self.turns if turn.reward is not None)

    @property
    def num_cut_replies(self) -> int:
        """The number of replies that a token limit ended; summaries do not count."""
        return sum(turn.finish_reason == "length" and not turn.asked for turn in self.turns)

    @property
    def ends_at_window(self) -> bool:
        """True if the context window cut the last reply."""
        return self.stop_reason is StopReason.CONTEXT and bool(self.turns) and self.turns[-1].finish_reason == "length"

    @property
    def reply_tokens(self) -> list[int]:
        """The number of sampled ids of each reply, summaries included; empty if the episode has no ids."""
        return [len(span.ids) for row in self.rows for span in row.spans if span.source is Source.POLICY]

    @property
    def success(self) -> bool | None:
        """The environment's own verdict (`metrics["success"]`), else whether the reward is positive; None if failed."""
        if not self.status.trainable:
            return None
        return bool(self.metrics["success"]) if "success" in self.metrics else (self.reward or 0.0) > 0

    @property
    def num_tokens(self) -> int:
        """The number of ids over all rows."""
        return sum(len(row) for row in self.rows)

    @property
    def num_trained_tokens(self) -> int:
        """The number of trained ids over all rows."""
        return sum(row.num_trained_tokens for row in self.rows)


@dataclass(frozen=True)
class Group:
    """The trajectories of one task; `id` is fixed when the episodes are dispatched."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        for trajectory in self.trajectories:
            if trajectory.group != self.id or trajectory.task != self.task:
                raise InvalidTrajectory(f"trajectory of group {trajectory.group!r} cannot join group {self.id!r}")
        members = [trajectory.member for trajectory in self.trajectories]
        if len(set(members)) != len(members):
            raise InvalidTrajectory(f"group {self.id!r} holds a member twice: {members}")
