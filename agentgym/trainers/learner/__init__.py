"""The learner, which computes the update of a step."""

from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.settings.learner import LearnerConfig

__all__ = ["Learner", "LearnerConfig"]
