"""Task sources of a run, the choice of a step's tasks, and the choice of the groups that it learns from."""

from agentgym.trainers.tasks.ahead import AheadTasks
from agentgym.trainers.tasks.choice import EnvChoice, env_choices, fixed_source, make_source
from agentgym.trainers.tasks.curriculum import CURRICULA, CurriculumTasks
from agentgym.trainers.tasks.filtering import StepGroups
from agentgym.trainers.tasks.fixed import FixedTasks
from agentgym.trainers.tasks.mix import MixedTasks, MixEntry
from agentgym.trainers.tasks.practice import CurriculumConfig, PracticeConfig, ReplayConfig
from agentgym.trainers.tasks.replay import ReplayedTasks
from agentgym.trainers.tasks.sampler import TaskSampler, own_sampler
from agentgym.trainers.tasks.source import EnvTasks, TaskSource

__all__ = [
    "CURRICULA",
    "AheadTasks",
    "CurriculumConfig",
    "CurriculumTasks",
    "EnvChoice",
    "EnvTasks",
    "FixedTasks",
    "MixEntry",
    "MixedTasks",
    "PracticeConfig",
    "ReplayConfig",
    "ReplayedTasks",
    "StepGroups",
    "TaskSampler",
    "TaskSource",
    "env_choices",
    "fixed_source",
    "make_source",
    "own_sampler",
]
