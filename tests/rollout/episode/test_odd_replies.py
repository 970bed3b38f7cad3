"""Replies that are cut, empty or ended twice, and answers of a megabyte: the row is exact and the end has its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.tools import tool
from agentgym.trajectory import Source, Status, StopReason, Trajectory
from agentgym.types import MalformedCall, Task

Raw = Callable[[str], list[int]]
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
MEGABYTE = 1 << 20


class Library(ToolEnv):
    """One book."""

    runs_inline = True
    max_turns = 3
    max_result_chars = 2 * MEGABYTE

    def __init__(self, num_chars: int = 10) -> None:
        super().__init__()
        self.num_chars = num_chars

    def start(self, options: dict[str, Any]) -> str:
        return "A library."

    @tool
    def read(self) -> str:
        """Reads the book."""
        return "<|im_end|>".ljust(self.num_chars, "é")


@pytest.fixture
def play(renderer: Renderer, tmp_path: Path) -> Callable[..., Trajectory]:
    """`play(replies, limits, env)`: the episode in which the engine says `replies`; its record verifies."""

    def run(
        replies: Sequence[Sequence[int]], limits: Limits | None = None, env: ToolEnv | None = None, **engine: Any
    ) -> Trajectory:
        replies_left, last = iter(replies), replies[-1]
        scripted = ScriptedEngine(lambda *_: next(replies_left, last), vocab_size=renderer.vocab_size, **engine)
        loop = RolloutLoop(scripted, renderer, limits)
        trajectory = asyncio.run(loop.run(env or Library(), Episode(Task("Library-v0", 1))))
        with EpisodeWriter(tmp_path) as writer:
            writer.write([trajectory])
        report = verify_run(tmp_path, renderer)
        assert report.ok, report.lines()
        return trajectory

    return run


def replies_of(trajectory: Trajectory) -> list[list[int]]:
    return [list(span.ids) for row in trajectory.rows for span in row.spans if span.source is Source.POLICY]


@pytest.mark.parametrize(
    ("text", "num_ids"), [("Something long", 7), (CALL, 1), (CALL, 20), (CALL, len(CALL) // 2), ("éé", 1)]
)
@pytest.mark.parametrize("cut_reply", ["truncate", "answer"])
def test_a_reply_that_is_cut_is_kept_as_it_is(
    play: Callable[..., Trajectory], renderer: Renderer, raw: Raw, text: str, num_ids: int, cut_reply: Any
) -> None:
    num_ids = min(num_ids, len(raw(text)) - 1)
    limits = Limits(turn_tokens=num_ids, cut_reply=cut_reply)
    trajectory = play([raw(text + END)], limits)
    num_turns = 1 if cut_reply == "truncate" else 3
    assert replies_of(trajectory) == [raw(text)[:num_ids]] * num_turns
    assert {turn.finish_reason for turn in trajectory.turns} == {"length"}
    if cut_reply == "truncate":
        assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, StopReason.TURN_TOKENS)
        return
    assert trajectory.stop_reason is StopReason.ENV_TRUNCATED
    answers = [span for span in trajectory.rows[0].spans if span.source is Source.ENV]
    assert all(span.ids[0] == renderer.stop_ids[0] for span in answers), "the end that the reply lacks is the answer's"
    if text == CALL:
        (cut,) = trajectory.turns[0].message.tool_calls
        assert isinstance(cut, MalformedCall) and cut.truncated
        assert trajectory.turns[0].tool_results[0].error == "truncated"
        assert trajectory.metrics["truncated_calls"] == 3 and trajectory.metrics["malformed_calls"] == 0


def test_an_empty_reply_gets_an_error_message(play: Callable[..., Trajectory], raw: Raw) -> None:
    trajectory = play([raw(END)])
    assert replies_of(trajectory) == [raw(END)] * 3
    assert all("Your reply was empty" in turn.observation for turn in trajectory.turns)
    assert trajectory.stop_reason is StopReason.ENV_TRUNCATED


def test_a_second_end_is_not_sampled_and_none_is_appended(play: Callable[..., Trajectory], raw: Raw) -> None:
    trajectory = play([raw("Hello." + END + END)])
    assert replies_of(trajectory) == [raw("Hello." + END)] * 3
    answer = next(span for span in trajectory.rows[0].spans if span.source is Source.ENV)
    assert answer.ids[0] == raw("\n")[0]


def test_an_engine_that_goes_on_after_the_end_is_an_engine_error(renderer: Renderer, raw: Raw) -> None:
    class Deaf(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
            ids = tuple(raw("Hello." + END + END))
            return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")

    loop = RolloutLoop(Deaf(lambda *_: ()), renderer)
    trajectory = asyncio.run(loop.run(Library(), Episode(Task("Library-v0", 1))))
    assert trajectory.status is Status.ENGINE_ERROR and "after a stop id" in str(trajectory.error)


@pytest.mark.slow
def test_a_result_of_a_megabyte_is_shown_whole_where_it_fits(play: Callable[..., Trajectory], raw: Raw) -> None:
    trajectory = play([raw(CALL + END), raw("Long!" + END)], env=Library(MEGABYTE), context_window=1 << 23)
    (row,) = trajectory.rows
    assert replies_of(trajectory) == [raw(CALL + END), raw("Long!" + END), raw("Long!" + END)]
    answer = row.spans[2]
    assert answer.source is Source.ENV and len(answer.ids) > MEGABYTE
    assert answer.ids.count(raw(END)[0]) == 1, "what the book spells is text"
    assert len(trajectory.turns[0].observation) == MEGABYTE


@pytest.mark.long
def test_a_result_of_a_megabyte_that_does_not_fit_ends_the_episode_with_its_reason(
    play: Callable[..., Trajectory], raw: Raw
) -> None:
    trajectory = play([raw(CALL + END)], env=Library(MEGABYTE), context_window=4096)
    assert (trajectory.status, trajectory.stop_reason) == (Status.TRUNCATED, StopReason.CONTEXT)
    assert replies_of(trajectory) == [raw(CALL + END)]
    assert trajectory.rows[0].spans[-1].source is Source.POLICY, "the row ends with the reply, whole"
    assert len(trajectory.turns[0].tool_results[0].content) == MEGABYTE
