"""What the actors of a run tell each other and the driver: the newest weights, and warnings."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from agentgym.trainers.cluster.actors import Actor, Parcel

__all__ = ["Board", "Posted", "relay_warnings", "report_warnings"]

_log = logging.getLogger(__name__)
POLL_S = 0.5
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

    async def post(self, posted: Posted) -> None:
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


async def relay_warnings(board: Actor) -> None:
    """Logs what the actors warn of, the same text once, until it is cancelled."""
    seen: set[str] = set()
    while True:
        for label, level, text in await board.call("news"):
            if text not in seen:
                seen.add(text)
                _log.log(level, "%s: %s", label, text)
        await asyncio.sleep(POLL_S)
