"""One episode: its key, and its record while it is being played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from agentgym.engines.protocol import Completion
from agentgym.rollout.hosting.answer import EnvStep, plain_answers
from agentgym.rollout.seeds import derive
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn, shortest_floats
from agentgym.types import JSON, MalformedCall, Message, Task, ToolSpec

__all__ = ["Episode", "EpisodeBuilder", "EpisodeEnd", "answered_turn", "policy_span"]

_RESULT_COUNTERS = {
    "unknown_tool": "unknown_tools",
    "invalid_arguments": "invalid_arguments",
    "tool_error": "tool_errors",
    "timeout": "tool_errors",
}
"""The metric that counts each kind of failed tool result; calls that cannot be parsed are counted from the reply
itself."""
NOTHING: Mapping[str, Any] = MappingProxyType({})
_COUNTERS = ("num_tool_calls", "malformed_calls", "truncated_calls", *_RESULT_COUNTERS.values())


@dataclass(frozen=True, slots=True)
class Episode:
    """The key of an episode of a run: `Episode(Task("TextGame-v0", 7), group="0/3", member=1, run_seed=0, step=0)`."""

    task: Task
    group: str = "0"
    member: int = 0
    run_seed: int = 0
    step: int = 0
    phase: str = "train"
    seat: str = ""
    """The agent that is played, if the other seats of the game are episodes too (self-play)."""

    @property
    def session(self) -> str:
        """The name of the episode's requests; no two live episodes share it."""
        return f"{self.phase}-{self.run_seed}-{self.step}-{self.group}-{self.member}"

    def seed(self, turn: int, part: int = 0, branch: str = "") -> int:
        """Returns the sampling seed of a turn; `part` counts the resumptions of its reply.

        `branch` names the branch of a served episode, empty for the conversation with the environment. The phase does
        not change the seed.
        """
        path = (*((branch,) if branch else ()), turn, *((part,) if part else ()))
        return derive(self.run_seed, self.step, self.group, self.member, *path)


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """The status, the stop reason and, for an episode that cannot be trained on, the line that names the failure."""

    status: Status
    reason: StopReason
    error: str | None = None
    info: Mapping[str, JSON] | None = None


class EpisodeBuilder:
    """The growing record of an episode.

    `ids` are all ids of the current row; new ids are only appended.
    """

    __slots__ = (
        "_info",
        "_messages",
        "_metrics",
        "_noted_info",
        "_noted_metrics",
        "_reply",
        "_rows",
        "_spans",
        "_tools",
        "answer",
        "episode",
        "ids",
        "num_finished",
        "num_summaries",
        "task_info",
        "turns",
    )

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.ids: list[int] = []
        self.num_finished = 0
        """The number of ids in finished rows."""
        self.turns: list[Turn] = []
        self._rows: list[Row] = []
        self._spans: list[TokenSpan] = []
        self.task_info: Mapping[str, JSON] = NOTHING
        """The environment's facts about the task after its reset: `HostedEnv.task_info`."""
        self.num_summaries = 0
        """The number of turns that the rollout asked for, and not the environment."""
        self._messages: tuple[Message, ...] | None = None
        self._tools: tuple[ToolSpec, ...] | None = None
        self._reply: Turn | None = None
        self.answer: EnvStep | None = None
        """The environment's last answer, whose info reports about the episode."""
        self._metrics: Mapping[str, float] = NOTHING
        self._info: Mapping[str, JSON] = NOTHING
        self._noted_metrics: Mapping[str, float] = NOTHING
        self._noted_info: Mapping[str, JSON] = NOTHING

    @property
    def num_tokens(self) -> int:
        """The number of ids of all rows so far."""
        return self.num_finished + len(self.ids)

    def begin_row(
        self,
        prompt_ids: Sequence[int],
        messages: Sequence[Message] | None = None,
        tools: Sequence[ToolSpec] | None = None,
    ) -> None:
        """Starts a row from the given messages and tools: the first one, or the one after a rewritten history."""
        self._end_row()
        self.ids = list(prompt_ids)
        self._spans = [TokenSpan(tuple(prompt_ids), Source.PROMPT)]
        self._messages = None if messages is None else tuple(messages)
        self._tools = None if tools is None else tuple(tools)

    def add_answer(self, ids: Sequence[int]) -> None:
        """Appends the template's render of the environment's answer."""
        if ids:
            self.ids.extend(ids)
            self._spans.append(TokenSpan(tuple(ids), Source.ENV))

    def add_reply(self, completion: Completion, message: Message, generate_s: float, *, excluded: str = "") -> None:
        """Appends a reply, and opens its turn; `excluded` is the reason if it is kept out of the loss."""
        self._add_sampled(completion, excluded)
        self.begin_turn(message, completion.finish_reason, generate_s, completion.stop)

    def _add_sampled(self, completion: Completion, excluded: str) -> None:
        self._spans.append(policy_span(completion, self._spans, excluded))
        self.ids.extend(completion.ids)

    def begin_turn(self, message: Message, finish_reason: str, generate_s: float, stop: str = "") -> None:
        """Opens the turn of a reply without ids."""
        timings = {"generate_s": generate_s}
        self._reply = Turn(message, None, finish_reason=finish_reason, stop=stop, timings=timings)

    def add_summary(self, completion: Completion, message: Message, request: str, *, excluded: str = "") -> None:
        """Appends a reply that the rollout asked for, as a turn without an answer."""
        self._add_sampled(completion, excluded)
        finish_reason, stop = completion.finish_reason, completion.stop
        self.turns.append(Turn(message, 0.0, finish_reason=finish_reason, asked=request, stop=stop))
        self.num_summaries += 1

    def end_turn(self, answer: EnvStep | None, env_s: float = 0.0) -> None:
        """Closes the turn with its answer, or with None (and reward 0) if the reply was never answered."""
        assert self._reply is not None
        self.answer = answer or self.answer
        turn, self._reply = self._reply, None
        self.turns.append(answered_turn(turn, answer or EnvStep("", ()), env_s))

    def keep_info(self) -> None:
        """Keeps what the last answer's info reports about the episode; raises EnvironmentFault for a non-number."""
        if self.answer is not None:
            self._metrics, self._info = self.answer.metrics(), self.answer.extras()

    def add_rows(self, rows: Sequence[Row], turns: Sequence[Turn]) -> None:
        """Adds finished rows with their turns, those of a conversation that was recorded elsewhere."""
        self._end_row()
        self._rows += rows
        self.turns += turns

    def forget_ids(self) -> None:
        """Drops all rows: an episode holds the ids of every reply, or none."""
        self._rows, self._spans, self.ids, self.num_finished = [], [], [], 0

    def note(self, metrics: Mapping[str, float], info: Mapping[str, JSON]) -> None:
        """Adds the metrics and info that the source of the replies reports about the episode."""
        self._noted_metrics, self._noted_info = dict(metrics), dict(info)

    def finish(self, ending: EpisodeEnd) -> Trajectory:
        """Returns the finished record; a reply that the environment failed to answer has no reward."""
        if self._reply is not None:
            self.turns.append(self._reply)
        self._end_row()
        episode = self.episode
        return Trajectory(
            task=episode.task,
            group=episode.group,
            member=episode.member,
            rows=tuple(self._rows),
            turns=tuple(self.turns),
            status=ending.status,
            stop_reason=ending.reason,
            metrics={**self._metrics, **call_counts(self.turns), **self._noted_metrics, **self._turn_counts()},
            error=ending.error,
            info={**self._info, **self._noted_info, **(ending.info or {}), **self.task_info},
        )

    def _turn_counts(self) -> dict[str, float]:
        summaries = {"num_summaries": self.num_summaries} if self.num_summaries else {}
        return {"num_turns": len(self.turns), **summaries}

    def _end_row(self) -> None:
        if self._spans:
            self._rows.append(Row(tuple(self._spans), self._messages, self._tools))
            self.num_finished += len(self.ids)
            self._spans, self.ids = [], []


def policy_span(completion: Completion, before: Sequence[TokenSpan], excluded: str = "") -> TokenSpan:
    """Returns the span of a reply after the spans `before` of its row."""
    experts = completion.experts
    if experts is not None:  # those that computed a token first, which sampled what follows it
        experts = experts.since(max((span.experts.stop for span in before if span.experts), default=0))
    sampled = (shortest_floats(completion.logprobs), completion.policy_versions, experts)
    return TokenSpan(completion.ids, Source.POLICY, *sampled, excluded=excluded)


def answered_turn(turn: Turn, answer: EnvStep, env_s: float = 0.0) -> Turn:
    """Returns the turn with its answer and the seconds that the environment took."""
    observation, tool_results, messages = answer.observation, answer.tool_results, answer.messages or None
    if messages is not None and messages in plain_answers(observation, tool_results):
        messages = None
    timings = {**turn.timings, "env_s": env_s}
    parts = replace(turn, observation=observation, tool_results=tool_results, messages=messages)
    return replace(parts, reward=answer.reward, timings=timings)


def call_counts(turns: Sequence[Turn]) -> dict[str, float]:
    """Returns how many tool calls were made, and how many failed for which reason."""
    counts = dict[str, float](dict.fromkeys(_COUNTERS, 0))
    for turn in turns:
        if turn.asked:  # a summary for the rollout, which runs no tools
            continue
        counts["num_tool_calls"] += len(turn.message.tool_calls)
        for call in turn.message.tool_calls:
            if isinstance(call, MalformedCall):
                counts["truncated_calls" if call.truncated else "malformed_calls"] += 1
        for result in turn.tool_results:
            if result.error in _RESULT_COUNTERS:
                counts[_RESULT_COUNTERS[result.error]] += 1
    return counts
