"""Policy losses: the public names of `agentgym.trainers.algorithms.losses`."""

from agentgym.trainers.algorithms.losses import *  # noqa: F403
from agentgym.trainers.algorithms.losses import __all__ as __all__
