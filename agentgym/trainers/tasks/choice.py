"""Creates the task source that the settings of a run describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentgym.data.loader import TaskLoader
from agentgym.errors import ConfigError
from agentgym.trainers.tasks.curriculum import CurriculumTasks
from agentgym.trainers.tasks.fixed import FixedTasks, by_level
from agentgym.trainers.tasks.mix import MixedTasks, read_mix
from agentgym.trainers.tasks.practice import CurriculumConfig, PracticeConfig
from agentgym.trainers.tasks.replay import ReplayedTasks
from agentgym.trainers.tasks.source import EnvTasks, TaskSource
from agentgym.types import JSON, Task

__all__ = ["EnvChoice", "env_choices", "fixed_source", "make_source"]


@dataclass(frozen=True, kw_only=True)
class EnvChoice:
    """An environment that a run trains on."""

    name: str
    """The name of the environment in reports."""
    env: str
    kwargs: Mapping[str, JSON]
    """The keywords of held-out tasks, and of training without a curriculum."""
    weight: float
    curriculum: CurriculumConfig

    @property
    def variants(self) -> list[Mapping[str, JSON]]:
        """All keywords that the environment is made with: the held-out tasks' first, then those of each level."""
        values = self.curriculum.values if self.curriculum.method != "off" else ()
        levels: list[Mapping[str, JSON]] = [{**self.kwargs, self.curriculum.by: value} for value in values]
        return [self.kwargs, *levels]


def env_choices(practice: PracticeConfig, env: str, env_kwargs: Mapping[str, JSON]) -> list[EnvChoice]:
    """Returns the environments of a mix, else the given one."""
    off = CurriculumConfig()
    if not practice.mix:
        return [EnvChoice(name=env, env=env, kwargs=env_kwargs, weight=1.0, curriculum=practice.curriculum)]
    choices = []
    for name, entry in read_mix(practice.mix).items():
        curriculum = practice.curriculum
        if entry.levels and curriculum.method == "off":
            raise ConfigError(f"mix: {name!r} has levels, and curriculum.method is off: add steps or learnability")
        if entry.levels is not None:
            curriculum = replace(curriculum, values=entry.levels) if entry.levels else off
        choices.append(
            EnvChoice(name=name, env=entry.env, kwargs=entry.kwargs, weight=entry.weight, curriculum=curriculum)
        )
    return choices


def make_source(
    practice: PracticeConfig, env: str, env_kwargs: Mapping[str, JSON], *, run_seed: int, tasks_per_step: int
) -> TaskSource:
    """Returns the source of a run on environments: each with its curriculum and its replay, mixed by weight."""
    choices = env_choices(practice, env, env_kwargs)
    sources = {choice.name: _with_replay(_env_source(choice, run_seed), practice) for choice in choices}
    if not practice.mix:
        return sources[env]
    mixed = MixedTasks(sources, [choice.weight for choice in choices], tasks_per_step)
    for choice in choices:
        labels = {mixed.label(Task(choice.env, 0, kwargs=kwargs)) for kwargs in choice.variants}
        if other := labels - {choice.name}:
            raise ConfigError(
                f"mix: {choice.name!r} and {other.pop()!r} have tasks in common: give them other kwargs or levels"
            )
    return mixed


def fixed_source(
    practice: PracticeConfig, train: Sequence[Task], held_out: Sequence[Task], *, run_seed: int, shuffle: bool = True
) -> TaskSource:
    """Returns the source of a run on given tasks.

    `curriculum.by` is a name in their options, dotted for nested ones. Raises ConfigError for a mix, which takes
    environments.
    """
    if practice.mix:
        raise ConfigError("a mix is one of environments, and the tasks are given: leave practice.mix out")
    source: TaskSource = FixedTasks(TaskLoader(train, run_seed, shuffle), held_out)
    curriculum = practice.curriculum
    if curriculum.method != "off":
        buckets = by_level(train, curriculum.by, curriculum.values)
        levels = {value: FixedTasks(TaskLoader(own, run_seed, shuffle), ()) for value, own in buckets.items()}
        source = CurriculumTasks(levels, source, curriculum.make(len(levels)), run_seed)
    return _with_replay(source, practice)


def _env_source(choice: EnvChoice, run_seed: int) -> TaskSource:
    base, curriculum = EnvTasks(choice.env, run_seed, choice.kwargs), choice.curriculum
    if curriculum.method == "off":
        return base
    levels = {str(kwargs[curriculum.by]): EnvTasks(choice.env, run_seed, kwargs) for kwargs in choice.variants[1:]}
    return CurriculumTasks(levels, base, curriculum.make(len(levels)), run_seed)


def _with_replay(source: TaskSource, practice: PracticeConfig) -> TaskSource:
    return ReplayedTasks(source, practice.replay) if practice.replay.share else source
