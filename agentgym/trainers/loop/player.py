"""Plays for a training run: the groups of a step, the episodes of a probe, and evaluations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from agentgym.http_guard import choose_token, shown_token
from agentgym.rewards import Rewards
from agentgym.rollout.agents.launcher import launched_agents
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.episode_loop import EpisodeLoop
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.sampling.group_stream import GroupRequest, GroupStream
from agentgym.rollout.sampling.sampler import Sampler
from agentgym.rollout.sampling.self_play import SelfPlaySampler
from agentgym.rollout.sampling.staleness import staleness
from agentgym.rollout.sampling.step_lengths import StepLengths
from agentgym.rollout.serving.http_server import EpisodeServer, ServeConfig
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.self_play import SeatedEpisodes, played_alone, rival_loop, seat_metrics, trained_seats
from agentgym.trainers.parts.stage import PROBE_EPISODES, Stage
from agentgym.trainers.tasks.ahead import AheadTasks
from agentgym.trainers.tasks.filtering import StepGroups, fill_step
from agentgym.trainers.tasks.source import TaskSource
from agentgym.trajectory import Group, Trajectory

__all__ = ["Player", "Sources", "open_player"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Player:
    """Plays the episodes of one run; `open_player` makes it."""

    config: TrainConfig
    source: TaskSource
    held_out: TaskSource
    """The source of the tasks of evaluations."""
    stage: Stage
    rewards: Rewards
    seats: tuple[str, ...]
    sampler: Sampler
    """Plays single episodes, with the policy in every seat."""
    evaluator: Sampler
    """Plays evaluations, likewise."""
    players: Sampler
    """Plays the groups of a step: the same sampler, or one for self-play or for agents over HTTP."""
    probe_sampler: Sampler
    stream: GroupStream | None
    """The groups that are played ahead."""
    _lengths: StepLengths
    _has_warned: bool = False

    def on_publish(self, version: int) -> None:
        """Called when the engine has this version of the weights."""
        if self.stream is not None:
            self.stream.advance(version)

    async def metrics(self, groups: Sequence[Group], version: int) -> Mapping[str, float]:
        """Returns the staleness of a step's groups and the idle times, or each seat's results in self-play.

        The step learns with policy `version`. The result is empty without playing ahead and without self-play.
        """
        if self.stream is None:
            return seat_metrics(groups, self.seats)
        waits = {name: round(value, 4) for name, value in asdict(self.stream.report()).items()}
        ages = await asyncio.to_thread(staleness, groups, version)
        return {**ages, **waits, **self._lengths.add(version + 1, groups)}

    async def groups(self, step: int) -> StepGroups:
        """Plays the groups of a step and selects those that it learns from."""
        config, practice = self.config, self.config.practice

        async def play(num_groups: int, before: Sequence[Group]) -> list[Group]:
            if self.stream is not None:
                played = await self.stream.take(num_groups, before)
            else:
                played = await self._play(self._requests(step, range(len(before), len(before) + num_groups)), before)
            if not self.rewards.together:
                return played
            played = await self.rewards.score_groups(played)
            self.players.check([trajectory for group in played for trajectory in group.trajectories])
            return played

        played = await fill_step(
            play, config.tasks, practice.filter or "off", practice.max_refills, config.truncated_episodes
        )
        if len(played.kept) < config.tasks and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "step %d: %d of %d groups have a signal after %d rounds of further ones, and it goes on with these"
                " (said once; see filtered_groups in metrics.jsonl): give easier or harder tasks, or more max_refills",
                *(step, len(played.kept), config.tasks, practice.max_refills),
            )
        return played

    async def greedy(self, groups: Sequence[Group], step: int) -> list[Trajectory]:
        """Plays one episode at temperature 0 of each group's task."""
        seed = self.config.seed
        episodes = [Episode(group.task, group.id, 0, seed, step, "greedy") for group in groups]
        sampler = self.stage.sampler(self.rewards.loop(self.stage.loop("greedy")), self.sampler.env_host)
        return await self._score_episodes(await sampler.run(episodes))

    async def probe(self, name: str, version: int) -> list[Trajectory]:
        """Plays short episodes of the next step's tasks, which are not recorded."""
        config = self.config
        tasks = played_alone([request.task for request in self._requests(version + 1)])[:PROBE_EPISODES]
        episodes = [Episode(task, f"{n}", 0, config.seed, version, f"parity-{name}") for n, task in enumerate(tasks)]
        return await self.probe_sampler.run(episodes)

    async def end_stream(self) -> None:
        """Ends what is played ahead."""
        if self.stream is not None:
            await self.stream.close()

    def held_out_episodes(self, phase: str) -> list[Episode]:
        """Returns the episodes of an evaluation, task by task.

        For one environment, they have the same ids as those that `agentgym eval` plays with this seed.
        """
        settings, seed = self.config.eval, self.config.seed
        tasks = played_alone(self.held_out.eval_tasks(settings.episodes))
        return [
            Episode(task, f"0/{number}", member, seed, phase=phase)
            for number, task in enumerate(tasks)
            for member in range(settings.repeats)
        ]

    async def evaluate(self, episodes: Sequence[Episode], on_episode: Callable[[Trajectory], None]) -> list[Trajectory]:
        """Plays the episodes of an evaluation."""
        return await self._score_episodes(await self.evaluator.run(episodes, on_episode=on_episode))

    async def _score_episodes(self, played: list[Trajectory]) -> list[Trajectory]:
        """Adds the rewards of a function that scores episodes together; other episodes have theirs already."""
        return await self.rewards.score(played) if self.rewards.together else played

    async def _play(self, requests: Sequence[GroupRequest], before: Sequence[Group]) -> list[Group]:
        """Plays a group for each request; `before` are groups of the same step."""
        size, seed = self.config.group_size, self.config.seed
        if self.seats:
            seated = SeatedEpisodes(requests, self.seats, rotates=self.config.rival is not None)
            return seated.groups(await self.players.run(seated.episodes(size, seed)))
        episodes = [
            Episode(request.task, request.key, member, seed, request.step)
            for request in requests
            for member in range(size)
        ]
        earlier = [trajectory for group in before for trajectory in group.trajectories]
        played = await self.players.run(episodes, earlier=earlier)
        members = [tuple(played[start : start + size]) for start in range(0, len(played), size)]
        return [Group(request.key, request.task, own) for request, own in zip(requests, members, strict=True)]

    def _requests(self, step: int, places: range | None = None) -> Sequence[GroupRequest]:
        """Returns the tasks of a step, or of some of its places, with the names of their groups."""
        places = range(self.config.tasks) if places is None else places
        tasks = self.source.train_tasks(step, places)
        return [GroupRequest(task, f"{step}/{place}", step) for place, task in zip(places, tasks, strict=True)]


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a run's tasks."""

    train: TaskSource
    held_out: TaskSource
    """The source of the tasks of evaluations."""


async def open_player(
    config: TrainConfig, stage: Stage, sources: Sources, rewards: Rewards, folder: Path, stack: AsyncExitStack
) -> tuple[Player, Sequence[str]]:
    """Creates the samplers of the run in `folder`, which the stack closes.

    Also returns lines to show: if agents play over HTTP, their URL and the token that they need.
    """
    loop, eval_loop = stage.loop("train"), stage.loop("eval")
    if config.agent.name:
        assert isinstance(loop, RolloutLoop) and isinstance(eval_loop, RolloutLoop)
        loop = await stack.enter_async_context(launched_agents(loop, config.agent, folder / "agents"))
        eval_loop = await stack.enter_async_context(launched_agents(eval_loop, config.agent, folder / "agents"))
    sampler = stage.sampler(rewards.loop(loop))
    stack.callback(sampler.close)
    evaluator = stage.sampler(rewards.loop(eval_loop), sampler.env_host)
    probe_sampler = stage.sampler(stage.loop("probe"), sampler.env_host)
    probe_sampler.checks_calls = False  # its replies are cut intentionally
    seats = trained_seats(config)
    players = _open_self_play(config, rewards.loop(loop), stack) if seats else sampler
    notices: list[str] = []
    if config.serve is not None:
        assert isinstance(loop, RolloutLoop)
        served = ServedLoop(loop, credit=config.agent.credit)
        token = choose_token("127.0.0.1", is_required=config.require_token)
        server = await stack.enter_async_context(EpisodeServer(served, ServeConfig(port=config.serve, token=token)))
        notices.append(f"serving the episodes of training at {server.url}")
        if token is not None:
            notices.append(f"token: {shown_token(token)}    (agents send it as their API key)")
        players = Sampler(rewards.loop(served), config=config.sampler, env_host=sampler.env_host)
    stream = None
    if isinstance(sources.train, AheadTasks):
        stream = GroupStream(
            players,
            sources.train.requests(),
            group_size=config.group_size,
            groups_per_step=config.tasks,
            max_staleness=config.max_staleness,
            run_seed=config.seed,
        )
        stack.push_async_callback(stream.close)
    lengths = StepLengths(config.tasks, config.max_staleness)
    samplers = (sampler, evaluator, players, probe_sampler)
    return Player(config, sources.train, sources.held_out, stage, rewards, seats, *samplers, stream, lengths), notices


def _open_self_play(config: TrainConfig, loop: EpisodeLoop, stack: AsyncExitStack) -> Sampler:
    """Creates the sampler of the games in self-play."""
    rival = rival_loop(config)
    if rival is not None:
        stack.push_async_callback(rival.close)
    sampler = SelfPlaySampler(loop, config=config.sampler, rival=rival)
    stack.callback(sampler.close)
    return sampler
