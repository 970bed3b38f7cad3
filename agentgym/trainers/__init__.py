"""Training: algorithms, settings, the learner and the loop.

The public names are loaded, and torch with them, when they are first used. `ADVANTAGES`, `LOSSES`, `KL_PENALTIES`,
`AGGREGATIONS` and `CORRECTIONS` map names to functions.
"""

from typing import TYPE_CHECKING

from agentgym.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agentgym.trainers.algorithms.advantages import ADVANTAGES, Credit, Groups
    from agentgym.trainers.algorithms.aggregation import AGGREGATIONS
    from agentgym.trainers.algorithms.corrections import CORRECTIONS
    from agentgym.trainers.algorithms.kl import KL_PENALTIES
    from agentgym.trainers.algorithms.losses import LOSSES, PolicyLoss, Tokens, loss_stats, traits
    from agentgym.trainers.algorithms.optimizers import OPTIMIZERS, SCHEDULES
    from agentgym.trainers.batch.batch import build_batch
    from agentgym.trainers.batch.credits import credit_groups, flat_credit
    from agentgym.trainers.config import AdvantageConfig, TrainConfig
    from agentgym.trainers.learner.learner import Learner
    from agentgym.trainers.lessons.config import DpoConfig, SftConfig
    from agentgym.trainers.loop.observer import Observer, Unobserved
    from agentgym.trainers.loop.trainer import Trainer
    from agentgym.trainers.settings.held_out import HeldOutConfig
    from agentgym.trainers.settings.learner import LearnerConfig
    from agentgym.trainers.settings.lora import LoraConfig
    from agentgym.trainers.settings.optimizer import OptimizerConfig
    from agentgym.trainers.settings.record import RecordConfig
    from agentgym.trainers.settings.sampling import TrainSamplingConfig
    from agentgym.trainers.tasks.sampler import TaskSampler

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_PENALTIES",
    "LOSSES",
    "OPTIMIZERS",
    "SCHEDULES",
    "AdvantageConfig",
    "Credit",
    "DpoConfig",
    "Groups",
    "HeldOutConfig",
    "Learner",
    "LearnerConfig",
    "LoraConfig",
    "Observer",
    "OptimizerConfig",
    "PolicyLoss",
    "RecordConfig",
    "SftConfig",
    "TaskSampler",
    "Tokens",
    "TrainConfig",
    "TrainSamplingConfig",
    "Trainer",
    "Unobserved",
    "build_batch",
    "credit_groups",
    "flat_credit",
    "loss_stats",
    "traits",
]

if __name__ != "agentgym.trainers":
    raise ImportError(f"{__name__!r} is a door for readers of the repository; import agentgym.trainers instead")

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ADVANTAGES": "algorithms.advantages",
        "AGGREGATIONS": "algorithms.aggregation",
        "AdvantageConfig": "config",
        "CORRECTIONS": "algorithms.corrections",
        "Credit": "algorithms.advantages",
        "DpoConfig": "lessons.config",
        "Groups": "algorithms.advantages",
        "HeldOutConfig": "settings.held_out",
        "KL_PENALTIES": "algorithms.kl",
        "LOSSES": "algorithms.losses",
        "Learner": "learner.learner",
        "LearnerConfig": "settings.learner",
        "LoraConfig": "settings.lora",
        "Observer": "loop.observer",
        "OPTIMIZERS": "algorithms.optimizers",
        "OptimizerConfig": "settings.optimizer",
        "PolicyLoss": "algorithms.losses",
        "RecordConfig": "settings.record",
        "SCHEDULES": "algorithms.optimizers",
        "SftConfig": "lessons.config",
        "TaskSampler": "tasks.sampler",
        "Tokens": "algorithms.losses",
        "TrainConfig": "config",
        "TrainSamplingConfig": "settings.sampling",
        "Trainer": "loop.trainer",
        "Unobserved": "loop.observer",
        "build_batch": "batch.batch",
        "credit_groups": "batch.credits",
        "flat_credit": "batch.credits",
        "loss_stats": "algorithms.losses",
        "traits": "algorithms.losses",
    },
)
