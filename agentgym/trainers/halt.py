"""Halts of a run: the public names of `agentgym.trainers.monitoring.halt`."""

from agentgym.trainers.monitoring.halt import HaltedStep, keep_episodes, load_batch

__all__ = ["HaltedStep", "keep_episodes", "load_batch"]
