"""A tracker on its own thread: it can be slow, hang or fail without an effect on the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from agentgym.errors import describe_error
from agentgym.tools.calling.worker_thread import WorkerThread
from agentgym.trainers.trackers.protocol import TrackedRun, Tracker

__all__ = ["Follower"]

logger = logging.getLogger(__name__)


class Follower:
    """Passes entries to a tracker in order; at most `room` entries wait, and further ones are dropped."""

    def __init__(self, name: str, tracker: Tracker, room: int) -> None:
        self.name = name
        self.num_dropped = 0
        """The number of entries that were dropped because the tracker was too slow."""
        self.failed = False
        """True if the tracker failed and is switched off."""
        self._tracker = tracker
        self._room = room
        self._thread = WorkerThread(f"agentgym-tracker-{name}")

    def begin(self, run: TrackedRun) -> None:
        """Queues the run's begin, the first entry."""
        self._put(lambda tracker: tracker.begin(run))

    def tell(self, what: Callable[[Tracker], None]) -> None:
        """Queues `what` to be called with the tracker; never waits."""
        if self.failed:
            return
        if self._thread.num_waiting >= self._room:
            self.num_dropped += 1
            return
        self._put(what)

    def finish(self, wait_s: float) -> None:
        """Waits at most `wait_s` for the remaining entries, and logs what was lost."""
        self._put(_finish)
        self._thread.stop()
        self._thread.join(wait_s)
        if self._thread.alive:
            logger.warning(
                "the tracker %s has not finished after %g s (tracking.finish_s) and is left: about %d entries are lost",
                self.name,
                wait_s,
                self._thread.num_waiting - 1,  # without the mark of the thread's end
            )
        if self.num_dropped:
            logger.warning(
                "the tracker %s was too slow: %d entries were left out (a larger tracking.room keeps more waiting);"
                " metrics.jsonl has all steps",
                self.name,
                self.num_dropped,
            )

    def _put(self, what: Callable[[Tracker], None]) -> None:
        self._thread.put(lambda: self._do(what))

    def _do(self, what: Callable[[Tracker], None]) -> None:
        if self.failed:
            return
        try:
            what(self._tracker)
        except Exception as error:  # the boundary around libraries and the user's trackers
            self.failed = True
            failure = describe_error(error)
            logger.warning("the tracker %s failed and is switched off, the run goes on: %s", self.name, failure)
            logger.debug("the tracker %s failed", self.name, exc_info=error)
            if what is not _finish:
                with suppress(Exception):  # a library would take the run for one that goes on
                    _finish(self._tracker)


def _finish(tracker: Tracker) -> None:
    tracker.finish()
