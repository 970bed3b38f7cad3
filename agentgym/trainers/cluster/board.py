"""A board on which the actors of a run share the newest weights and report warnings to the driver."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from agentgym.trainers.cluster.actors import Actor, ActorLost
from agentgym.trainers.cluster.shipment import Shipment

__all__ = ["Board", "BoardKeeper", "Posted", "report_warnings"]

_log = logging.getLogger(__name__)
POLL_S = 0.5
PATIENCE_S = 60.0
"""The seconds that a dead board may take to restart."""
MAX_NEWS = 1000


@dataclass(frozen=True, eq=False)
class Posted:
    """The newest weights, which a restarted engine takes from the board."""

    version: int
    shipment: Shipment


class Board:
    """An actor that stores the weights that were published last and the warnings of other actors."""

    def __init__(self) -> None:
        self._posted: Posted | None = None
        self._news: deque[tuple[str, int, str]] = deque(maxlen=MAX_NEWS)

    async def post(self, posted: Posted | None) -> None:
        """Replaces the stored weights."""
        self._posted = posted

    async def newest(self) -> Posted | None:
        """Returns the newest weights, or None before the first ones."""
        return self._posted

    async def warn(self, label: str, level: int, text: str) -> None:
        """Keeps a warning until the driver asks for it."""
        self._news.append((label, level, text))

    async def news(self) -> tuple[bool, list[tuple[str, int, str]]]:
        """Returns whether weights are stored, and the warnings since the last call."""
        warnings = list(self._news)
        self._news.clear()
        return self._posted is not None, warnings


class _Reporter(logging.Handler):
    """Sends an actor's log records to the board."""

    def __init__(self, label: str, board: Actor[Board]) -> None:
        super().__init__(logging.WARNING)
        self._label = label
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        self._board.tell(Board.warn, self._label, record.levelno, record.getMessage())


def report_warnings(label: str, board: Actor[Board]) -> None:
    """Sends this process's warnings to the board, so that they appear where the run was started."""
    logger = logging.getLogger("agentgym")
    logger.handlers = [_Reporter(label, board)]
    logger.propagate = False


class BoardKeeper:
    """The driver's side of the board: posts weights, logs the actors' warnings, and refills a restarted board."""

    def __init__(self, board: Actor[Board]) -> None:
        self.board = board
        self._posted: Posted | None = None
        self._is_up = False
        """True if the board has the posted weights, unless it was restarted since."""
        self._is_lost = False
        self._texts: set[str] = set()

    async def post(self, posted: Posted) -> None:
        """Posts the weights for engines that restart; raises ActorLost if the board is dead for good."""
        self._posted, self._is_up = posted, False
        await self._put_up()

    async def relay(self) -> None:
        """Logs warnings, each text once, until it is cancelled or the board is dead for good."""
        try:
            while True:
                try:
                    await self.tell_news()
                except ActorLost as error:
                    await self._refill(error)
                await asyncio.sleep(POLL_S)
        except ActorLost:
            _log.warning("the board died more than ray.max_restarts times: warnings of actors are no longer shown here")

    async def _refill(self, reason: object) -> None:
        self._tell_loss(reason)
        await self._put_up()

    def _tell_loss(self, reason: object) -> None:
        """Logs that the board died, once until it has weights again."""
        if not self._is_lost:
            _log.warning("%s; what actors warned of since is lost", reason)
        self._is_lost, self._is_up = True, False

    async def _put_up(self) -> None:
        ends = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                await self.board.call(Board.post, self._posted)
                self._is_lost, self._is_up = False, self._posted is not None
                return
            except ActorLost as error:
                self._tell_loss(error)
                if asyncio.get_running_loop().time() > ends:
                    raise
                await asyncio.sleep(POLL_S)

    async def tell_news(self) -> None:
        """Logs new warnings, and refills a board that was restarted; raises ActorLost if it is gone."""
        is_up = self._is_up
        has_weights, news = await self.board.call(Board.news)
        for label, level, text in news:
            if text not in self._texts:
                self._texts.add(text)
                _log.log(level, "%s: %s", label, text)
        if is_up and self._is_up and not has_weights:
            await self._refill("the board is gone: its process died, and was restarted")
