"""The board of a run is filled again when it was restarted, whether or not somebody asked it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from agentgym.trainers.cluster import board as board_module
from agentgym.trainers.cluster.actors import ActorLost
from agentgym.trainers.cluster.board import Board, BoardKeeper, Posted

WEIGHTS = Posted(3, cast(Any, None))


class Restarting:
    """A board's actor, whose process can be replaced by an empty one."""

    def __init__(self) -> None:
        self.board = Board()
        self.refusals = 0

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise ActorLost("the board is gone: its process died, or its node cannot be reached")
        return await method(self.board, *arguments)


@pytest.mark.parametrize("refusals", [0, 1, 2])
@pytest.mark.parametrize("asker", ["relay", "post"])
def test_lost_weights_are_published_again_with_one_warning(
    refusals: int, asker: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "POLL_S", 0.001)

    async def play() -> Posted | None:
        actor = Restarting()
        keeper = BoardKeeper(cast(Any, actor))
        relay = asyncio.ensure_future(keeper.relay())
        await keeper.post(WEIGHTS)
        await asyncio.sleep(0.01)
        assert not caplog.messages
        actor.board, actor.refusals = Board(), refusals
        if asker == "post":
            await keeper.post(WEIGHTS)
        for _ in range(100):
            await asyncio.sleep(0.001)
        relay.cancel()
        return await actor.board.newest()

    assert asyncio.run(play()) == WEIGHTS
    expected = 0 if asker == "post" and not refusals else 1  # a board that is filled by chance has lost no weights
    assert len([text for text in caplog.messages if text.startswith("the board is gone")]) == expected
