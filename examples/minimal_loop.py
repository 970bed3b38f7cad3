"""GRPO as a loop of one's own, over public names: play, compare, learn, hand the new weights to the engine.

python examples/minimal_loop.py                               # 25 steps of TextGame-v0, as `make train`
python examples/minimal_loop.py --steps 8 --held-out 100      # the first of them

docs/grpo.md explains it line by line.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from agentgym import Trajectory, create_engine
from agentgym.envs import make_env
from agentgym.evaluation import ModelEngine, eval_tasks
from agentgym.rollout import Episode, RolloutLoop
from agentgym.trainers import Learner, LearnerConfig, OptimizerConfig, build_batch, flat_credit
from agentgym.trajectory import Group
from agentgym.types import Task


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the loop."""

    model: str = "embedded"
    env: str = "TextGame-v0"
    level: int = 2
    steps: int = 25
    tasks: int = 16
    """Tasks of a step."""
    group_size: int = 8
    """Episodes of a task."""
    learning_rate: float = 4e-4
    held_out: int = 200
    """Tasks of the evaluations before and after."""


def main(settings: Settings) -> tuple[float, float]:
    """Trains a model and returns its success on held-out tasks, before and after."""
    with create_engine(settings.model, num_slots=128) as engine:
        loop = RolloutLoop(engine.engine, engine.renderer)
        optimizer = OptimizerConfig(learning_rate=settings.learning_rate)
        learner = Learner(engine.engine.model, LearnerConfig(), optimizer, total_steps=settings.steps)
        before = evaluate(engine, loop, settings)
        for step in range(settings.steps):
            train_step(engine, loop, learner, step, settings)
        after = evaluate(engine, loop, settings)
        learner.close()
    return before, after


def train_step(engine: ModelEngine, loop: RolloutLoop, learner: Learner, step: int, settings: Settings) -> None:
    """Plays, credits and learns once; the policy's version is `step` before, and `step + 1` after."""
    seeds = range(step * settings.tasks, (step + 1) * settings.tasks)
    tasks = [Task(settings.env, seed, kwargs={"level": settings.level}) for seed in seeds]
    groups = engine.run(play_groups(loop, tasks, settings.group_size, step))
    credits = [flat_credit(group, advantages(group)) for group in groups]
    batch = build_batch(groups, credits, aggregation="token-mean", drop_zero=True)
    engine.run(engine.engine.pause())  # nothing is sampled while the weights change
    if batch.num_rows:  # 0 if the members of each group have equal rewards
        stats = learner.update(batch, version=step)
        print(f"step {step + 1}: success {success(groups):.3f}, loss {stats.loss:+.4f}, entropy {stats.entropy:.3f}")
    engine.run(engine.engine.update_weights({}, step + 1))  # {}: engine and learner share the tensors
    engine.run(engine.engine.resume())


def evaluate(engine: ModelEngine, loop: RolloutLoop, settings: Settings) -> float:
    """Plays tasks that training never draws, and returns the share that succeeds."""
    tasks = eval_tasks(settings.env, settings.held_out, {"level": settings.level})
    score = success(engine.run(play_groups(loop, tasks, 1, step=0)))
    print(f"held-out success of {len(tasks)} tasks: {score:.3f}")
    return score


async def play_groups(loop: RolloutLoop, tasks: Sequence[Task], group_size: int, step: int) -> list[Group]:
    """Plays each task `group_size` times, all of them at once; seeds follow from step, task and member."""
    names = [f"{step}/{number}" for number in range(len(tasks))]
    members = range(group_size)
    played = await asyncio.gather(
        *(
            play(loop, Episode(task, name, member, step=step))
            for task, name in zip(tasks, names, strict=True)
            for member in members
        )
    )
    parts = [tuple(played[start : start + group_size]) for start in range(0, len(played), group_size)]
    return [Group(name, task, part) for name, task, part in zip(names, tasks, parts, strict=True)]


async def play(loop: RolloutLoop, episode: Episode) -> Trajectory:
    """Plays one episode, in an environment of its own."""
    env = make_env(episode.task.env_id, dict(episode.task.kwargs))
    try:
        return await loop.run(env, episode)
    finally:
        env.close()


def advantages(group: Group) -> list[float | None]:
    """Returns how far each episode's reward is from the group's mean, in standard deviations; None if it failed."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2:
        return [None] * len(rewards)
    mean, deviation = statistics.mean(valid), statistics.stdev(valid)
    return [None if reward is None else (reward - mean) / (deviation + 1e-6) for reward in rewards]


def success(groups: Sequence[Group]) -> float:
    """Returns the share of episodes that succeed, among those that did not fail."""
    return statistics.mean(
        bool(episode.success) for group in groups for episode in group.trajectories if episode.success is not None
    )


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
