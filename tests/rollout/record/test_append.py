"""The event loop goes on while episodes of many tokens are encoded and written, and a step is written whole or not."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from agentgym.errors import RunFolderError
from agentgym.rollout.record import chain
from agentgym.rollout.record.episodes_file import EpisodeWriter, read_episodes, trajectory_to_json
from agentgym.rollout.record.json_pieces import PIECE
from agentgym.rollout.record.line_reader import FILE_NAME
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task, ToolSpec

Lateness = Callable[[Callable[[], Awaitable[object]]], float]
LOOK = ToolSpec("look", "Looks.", {"type": "object"})


def long_episode(num_tokens: int, member: int = 0) -> Trajectory:
    """An episode of a reply of so many tokens."""
    ids = tuple(range(num_tokens))
    reply = TokenSpan(ids, Source.POLICY, tuple(-number / 7919 for number in ids), (3,) * num_tokens)
    row = Row((TokenSpan((1, 2), Source.PROMPT), reply), (Message("user", "Look."),), (LOOK,))
    turn = Turn(Message("assistant", "a" * num_tokens), 0.5)
    return Trajectory(Task("X-v0", 1), "0", member, (row,), (turn,), Status.COMPLETED, StopReason.TERMINATED)


def credit_of(episodes: Sequence[Trajectory]) -> list[list[list[float]]]:
    return [[[number / 3 for number in range(row.num_trained_tokens)] for row in each.rows] for each in episodes]


@pytest.mark.long
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("num_episodes", "num_tokens"), [(64, 2_000), (1, 400_000)])
def test_the_event_loop_waits_for_no_step_and_no_long_episode(
    tmp_path: Path, worst_lateness: Lateness, num_episodes: int, num_tokens: int, compress: bool
) -> None:
    episodes = [long_episode(num_tokens, member) for member in range(num_episodes)]
    with EpisodeWriter(tmp_path, compress=compress) as writer:
        started = time.perf_counter()
        writer.write(episodes, step=4, advantages=credit_of(episodes))
        alone_s = time.perf_counter() - started
        late_s = worst_lateness(lambda: writer.append(episodes, step=4, advantages=credit_of(episodes)))
        assert late_s < max(alone_s / 4, 0.05)


def test_a_long_episode_has_the_line_of_one_call_of_the_encoder(tmp_path: Path) -> None:
    episodes = [long_episode(number, member) for member, number in enumerate((2, PIECE, 5 * PIECE + 3))]
    advantages = credit_of(episodes)
    with EpisodeWriter(tmp_path) as writer:
        writer.write(episodes, step=4, advantages=advantages)
    objects = [trajectory_to_json(each, step=4, advantages=own) for each, own in zip(episodes, advantages, strict=True)]
    texts = [json.dumps(each, allow_nan=False, separators=(",", ":"), default=dict) for each in objects]
    assert (tmp_path / FILE_NAME).read_bytes() == chain.chained_lines(texts)[0]
    assert [record.trajectory for record in read_episodes(tmp_path)] == episodes


def test_a_step_that_cannot_be_encoded_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "HELD_BYTES", 1)  # each line is written before the next one is encoded
    episodes = [long_episode(8, member) for member in range(3)]
    with EpisodeWriter(tmp_path) as writer:
        writer.write(episodes[:1])
        before, head = (tmp_path / FILE_NAME).read_bytes(), writer.head
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.write(episodes[1:], advantages=[None, [[float("nan")] * 8]])
        assert ((tmp_path / FILE_NAME).read_bytes(), writer.head) == (before, head)
        writer.write(episodes[2:])
    assert [record.trajectory.member for record in read_episodes(tmp_path)] == [0, 2]


def held(episodes: Sequence[Trajectory], is_writing: threading.Event, goes_on: threading.Event) -> Iterator[None]:
    """Yields no advantages of each episode; the second one waits."""
    yield None
    is_writing.set()
    goes_on.wait()
    for _ in episodes[1:]:
        yield None


@pytest.mark.parametrize("closes", [False, True])
def test_a_threaded_write_finishes_after_a_cancellation_and_a_close_undoes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    monkeypatch.setattr(chain, "HELD_BYTES", 1)
    episodes = [long_episode(8, member) for member in range(3)]
    is_writing, goes_on = threading.Event(), threading.Event()
    writer = EpisodeWriter(tmp_path)

    async def cancel() -> None:
        task = asyncio.create_task(writer.append(episodes, advantages=held(episodes, is_writing, goes_on)))
        await asyncio.to_thread(is_writing.wait)
        task.cancel()
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(writer.close)) if closes else None
        await asyncio.sleep(0.05)
        assert not task.done()
        goes_on.set()
        await task
        assert closing is not None

    with pytest.raises(RunFolderError if closes else asyncio.CancelledError):
        asyncio.run(cancel())
    writer.close()
    assert [record.trajectory.member for record in read_episodes(tmp_path)] == ([] if closes else [0, 1, 2])
