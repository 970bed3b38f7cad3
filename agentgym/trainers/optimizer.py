"""The optimizer: the public names of `agentgym.trainers.learner.optimizer`."""

from agentgym.trainers.learner.optimizer import PolicyOptimizer
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["OptimizerConfig", "PolicyOptimizer"]
