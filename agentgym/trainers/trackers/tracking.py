"""All trackers of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from agentgym.chat_templates.protocol import Renderer
from agentgym.errors import ConfigError
from agentgym.trainers.settings.tracking import TrackingConfig
from agentgym.trainers.trackers.follower import Follower
from agentgym.trainers.trackers.protocol import ShownEpisode, TrackedRun, Tracker
from agentgym.trainers.trackers.registry import open_tracker
from agentgym.trajectory import Trajectory
from agentgym.types import JSON

__all__ = ["Tracking", "shown_episode"]

MAX_WAITING = 256
"""The entries that may wait for a slow tracker: hundreds of steps, in a few megabytes."""
FINISH_S = 60.0
"""Seconds that the end of a run waits for its trackers, as long as a server may take to come back."""


class Tracking:
    """Passes a run's numbers and episodes to its trackers, each on its own thread.

    Raises for trackers that cannot be opened.
    """

    def __init__(self, names: Sequence[str], config: TrackingConfig) -> None:
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ConfigError(f"the tracker {twice[0]} is named twice")
        self.config = config
        self.trackers: list[tuple[str, Tracker]] = [(name, open_tracker(name)) for name in names]
        self.followers: list[Follower] = []

    @contextmanager
    def following(self, run: TrackedRun) -> Iterator[None]:
        """Starts the trackers for the run in the `with` statement, and finishes them; may be used for several runs."""
        self.followers = [Follower(name, tracker, MAX_WAITING) for name, tracker in self.trackers]
        for follower in self.followers:
            follower.begin(run)
        try:
            yield
        finally:
            for follower in self.followers:
                follower.finish(FINISH_S)

    def step(self, step: int, metrics: Mapping[str, JSON]) -> None:
        """Passes on the finite numbers among `metrics`."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and name != "step" and math.isfinite(value)
        }
        self._tell(lambda tracker: tracker.step(step, numbers))

    def episodes(self, step: int, played: Sequence[Trajectory], renderer: Renderer) -> None:
        """Passes on a sample of the step's episodes, if one is due."""
        every, number = self.config.episodes_every, min(self.config.episodes, len(played))
        if not (self.followers and every and number) or (step - 1) % every:
            return
        chosen = [played[index * len(played) // number] for index in range(number)]
        sample = [shown_episode(step, episode, renderer) for episode in chosen]
        self._tell(lambda tracker: tracker.episodes(step, sample))

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for follower in self.followers:
            follower.tell(what)


def shown_episode(step: int, episode: Trajectory, renderer: Renderer) -> ShownEpisode:
    """Returns an episode as text: its last row, to which the other rows led."""
    prompt = replies = ""
    if episode.rows:
        first, *others = episode.rows[-1].spans
        prompt = renderer.decode(first.ids)
        replies = renderer.decode([token for span in others for token in span.ids])
    return ShownEpisode(
        step=step,
        group=episode.group,
        member=episode.member,
        env=episode.task.env_id,
        prompt=prompt,
        replies=replies,
        reward=episode.reward,
        success=episode.success,
        status=str(episode.status),
        stop_reason=str(episode.stop_reason),
    )
