"""What the actors of a run tell each other and the driver: the newest weights, and warnings."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from agentgym.trainers.cluster.actors import Actor, ActorLost, Parcel

__all__ = ["Board", "BoardKeeper", "Posted", "report_warnings"]

_log = logging.getLogger(__name__)
POLL_S = 0.5
PATIENCE_S = 60.0
"""Seconds in which a board that died is begun anew."""
MOST_NEWS = 1000


@dataclass(frozen=True, eq=False)
class Posted:
    """The newest weights, where an engine that was begun anew finds them."""

    version: int
    weights: Parcel


class Board:
    """An actor that remembers the weights that were published last, and what actors warned of."""

    def __init__(self) -> None:
        self._posted: Posted | None = None
        self._news: deque[tuple[str, int, str]] = deque(maxlen=MOST_NEWS)

    async def post(self, posted: Posted | None) -> None:
        """Remembers weights in place of the ones before."""
        self._posted = posted

    async def newest(self) -> Posted | None:
        """None before the first."""
        return self._posted

    async def warn(self, label: str, level: int, text: str) -> None:
        """Keeps a warning until the driver asks."""
        self._news.append((label, level, text))

    async def news(self) -> list[tuple[str, int, str]]:
        """The warnings since the last time."""
        found = list(self._news)
        self._news.clear()
        return found


class _Reporter(logging.Handler):
    """Sends what is logged in an actor to the board."""

    def __init__(self, label: str, board: Actor) -> None:
        super().__init__(logging.WARNING)
        self._label = label
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        self._board.tell("warn", self._label, record.levelno, record.getMessage())


def report_warnings(label: str, board: Actor) -> None:
    """Has this process's warnings appear where the run was begun."""
    logger = logging.getLogger("agentgym")
    logger.handlers = [_Reporter(label, board)]
    logger.propagate = False


class BoardKeeper:
    """The driver's side of the board: posts weights, logs what the actors warn of, and fills a board that was begun
    anew."""

    def __init__(self, board: Actor) -> None:
        self.board = board
        self._posted: Posted | None = None
        self._seen: set[str] = set()

    async def post(self, posted: Posted) -> None:
        """Has the weights found by engines that are begun anew; raises ActorLost when the board is dead for good."""
        self._posted = posted
        await self._put_up()

    async def relay(self) -> None:
        """Logs warnings, the same text once, until it is cancelled or the board is dead for good."""
        try:
            while True:
                try:
                    await self.tell_news()
                except ActorLost as error:
                    _log.warning("%s; what actors warned of since is lost", error)
                    await self._put_up()
                await asyncio.sleep(POLL_S)
        except ActorLost:
            _log.warning("the board died more than ray.max_restarts times: warnings of actors are no longer shown here")

    async def _put_up(self) -> None:
        ends = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                await self.board.call("post", self._posted)
                return
            except ActorLost:
                if asyncio.get_running_loop().time() > ends:
                    raise
                await asyncio.sleep(POLL_S)

    async def tell_news(self) -> None:
        """Logs what is new; raises ActorLost when the board is gone."""
        for label, level, text in await self.board.call("news"):
            if text not in self._seen:
                self._seen.add(text)
                _log.log(level, "%s: %s", label, text)
