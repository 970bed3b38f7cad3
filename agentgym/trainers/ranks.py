"""Learner ranks: the public names of `agentgym.trainers.parallel.ranks`."""

from agentgym.trainers.parallel.ranks import Ranks

__all__ = ["Ranks"]
