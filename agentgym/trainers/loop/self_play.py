"""A run in self-play: its valid settings, the groups of its seats, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from agentgym.chat_templates import open_renderer
from agentgym.chat_templates.recorded_format import recorded_format
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.envs.base.opponents import SELF
from agentgym.envs.base.policies import POLICIES
from agentgym.envs.catalog.resolve import make_env
from agentgym.errors import ConfigError, RunFolderError
from agentgym.loading import is_code_path
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.sampling.group_stream import GroupRequest
from agentgym.rollout.sampling.self_play import group_of, seats_of
from agentgym.trainers.algorithms.estimators import needs_input
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.monitoring.metrics import mean
from agentgym.trainers.parts.engine import load_model
from agentgym.trainers.parts.stage import loop_for
from agentgym.trajectory import Group, Trajectory
from agentgym.types import JSON, Task

__all__ = ["SeatedEpisodes", "alone", "played_alone", "rival_folder", "rival_loop", "seat_metrics", "trained_seats"]

EVALUATED_AGAINST = "random"
"""The opponent in evaluations, and in the short episodes that check the engine."""


def trained_seats(config: TrainConfig) -> tuple[str, ...]:
    """Returns the seats that the run's episodes play, or () without self-play.

    Raises ConfigError for settings that self-play does not support.
    """
    if config.is_lesson or config.env_kwargs.get("opponent") != SELF:
        if config.rival is not None:
            raise ConfigError("a rival plays the other seats of a game in self-play: add --env-kwargs opponent=self")
        return ()
    env = make_env(config.env, cast(Mapping[str, JSON], config.env_kwargs))
    seats = seats_of(env)
    env.close()
    if config.rival is not None and not seats:
        raise ConfigError(
            f"a rival plays the other seats of a game in self-play, and {config.env} is none: leave it out"
        )
    practice = config.practice
    unfit = {
        "practice.mix": bool(practice.mix),
        "practice.filter": practice.filter != "off",
        "practice.replay": bool(practice.replay.share),
        "practice.curriculum": practice.curriculum.method != "off",
        "data": config.data.has_files,
        "max_staleness": bool(config.max_staleness),
        "serve": config.serve is not None,
        "agent": bool(config.agent.name),
        "sampler.env_processes": bool(config.sampler.env_processes),
        "executor ray": config.executor == "ray",
        f"the advantage {config.estimator}": needs_input(config.estimator, "greedy_B"),
    }
    conflicts = [name for name, is_set in unfit.items() if is_set] if seats else []
    if conflicts:
        raise ConfigError(f"self-play (opponent={SELF}) does not go with {conflicts[0]}: leave it out")
    if seats and config.rival is None and config.sampler.concurrency < len(seats):
        raise ConfigError(
            f"a game of {len(seats)} seats takes sampler.concurrency of at least {len(seats)}, got"
            f" {config.sampler.concurrency}"
        )
    return seats


def rival_loop(config: TrainConfig) -> RolloutLoop | None:
    """Returns the loop that plays the other seats with frozen weights; None if the trained policy plays them all."""
    if config.rival is None:
        return None
    folder = rival_folder(config.rival)
    engine = LocalEngine(load_model(folder, config).requires_grad_(False), LocalEngineConfig(**asdict(config.local)))
    own = config.family if config.family and is_code_path(config.family) else None
    variables = {**config.chat_template_kwargs, **recorded_format(folder).chat_template_kwargs}
    return loop_for("train", config, engine, open_renderer(folder, own, date=config.date, variables=variables))


def rival_folder(rival: str) -> Path:
    """Returns the folder of a rival's model; raises ConfigError for a policy, RunFolderError if there is no model."""
    folder = Path(rival)
    if rival in POLICIES:
        raise ConfigError(
            f"a rival is a model folder, and {rival} a policy, which plays inside the environment: --env-kwargs"
            f" opponent={rival}"
        )
    if not (folder / "config.json").is_file():
        raise RunFolderError(f"there is no model in {rival!r} to be the rival: name a checkpoint's folder")
    return folder


def alone(kwargs: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Returns the keywords with an opponent that needs no model; unchanged without self-play."""
    return {**kwargs, "opponent": EVALUATED_AGAINST} if kwargs.get("opponent") == SELF else kwargs


def played_alone(tasks: Sequence[Task]) -> list[Task]:
    """Returns the tasks with an opponent that needs no model."""
    return [replace(task, kwargs=alone(task.kwargs)) for task in tasks]


class SeatedEpisodes:
    """The episodes of games in self-play, and their groups: the same seat in the games of the same task.

    With `rotates`, one seat of each game is trained, which changes from task to task and from step to step; else all
    are.
    """

    def __init__(self, requests: Sequence[GroupRequest], seats: tuple[str, ...], *, rotates: bool) -> None:
        turns = [(request, (place + request.step - 1) % len(seats)) for place, request in enumerate(requests)]
        self._games = [(request, (seats[turn],) if rotates else seats) for request, turn in turns]
        self._groups = [(request, seat) for request, own in self._games for seat in own]

    def episodes(self, group_size: int, run_seed: int) -> list[Episode]:
        """Returns the episodes game by game: the seats of a game follow each other."""
        return [
            Episode(request.task, group_of(request.key, seat), member, run_seed, request.step, seat=seat)
            for request, own in self._games
            for member in range(group_size)
            for seat in own
        ]

    def groups(self, played: Sequence[Trajectory]) -> list[Group]:
        """Returns the groups of the played `episodes`."""
        members: dict[str, list[Trajectory]] = {}
        for trajectory in played:
            members.setdefault(trajectory.group, []).append(trajectory)
        names = [(group_of(request.key, seat), request.task) for request, seat in self._groups]
        return [Group(name, task, tuple(members[name])) for name, task in names]


def seat_metrics(groups: Sequence[Group], seats: Sequence[str]) -> dict[str, float]:
    """Returns `win/SEAT`, `draw/SEAT` (if the game reports it) and `reward_mean/SEAT` over episodes with a reward."""
    metrics: dict[str, float] = {}
    for seat in seats:
        own = [
            trajectory for group in groups if group.id.endswith(group_of("", seat)) for trajectory in group.trajectories
        ]
        episodes = [trajectory for trajectory in own if trajectory.status.trainable]
        if not episodes:
            continue
        metrics[f"win/{seat}"] = round(mean([float(bool(trajectory.success)) for trajectory in episodes]), 4)
        if any("draw" in trajectory.metrics for trajectory in episodes):
            metrics[f"draw/{seat}"] = round(mean([trajectory.metrics.get("draw", 0.0) for trajectory in episodes]), 4)
        metrics[f"reward_mean/{seat}"] = round(mean([trajectory.reward or 0.0 for trajectory in episodes]), 4)
    return metrics
