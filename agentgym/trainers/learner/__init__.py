"""The learner: what computes a step"s update."""

from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.settings.learner import LearnerConfig

__all__ = ["Learner", "LearnerConfig"]
