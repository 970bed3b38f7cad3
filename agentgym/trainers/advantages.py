"""Advantage estimators: the public names of `agentgym.trainers.algorithms.advantages`."""

from agentgym.trainers.algorithms.advantages import *  # noqa: F403
from agentgym.trainers.algorithms.advantages import __all__ as __all__
