"""Trackers for the numbers of a run: TensorBoard, Weights & Biases, MLflow, trackio, or your own."""

from agentgym.trainers.settings.tracking import TrackingConfig
from agentgym.trainers.trackers.protocol import ShownEpisode, TrackedRun, Tracker
from agentgym.trainers.trackers.registry import TRACKERS, open_tracker
from agentgym.trainers.trackers.tracking import Tracking

__all__ = ["TRACKERS", "ShownEpisode", "TrackedRun", "Tracker", "Tracking", "TrackingConfig", "open_tracker"]
