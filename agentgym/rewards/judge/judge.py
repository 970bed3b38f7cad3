"""Rewards from a judge: a model at a chat endpoint that reads episodes and replies with scores or a ranking."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Sequence
from dataclasses import asdict

from agentgym.engines.openai.config import ChatEndpointConfig
from agentgym.engines.openai.endpoint import ChatEndpoint, EndpointFailure
from agentgym.engines.protocol import Sampling
from agentgym.rewards.judge.config import JudgeConfig
from agentgym.rewards.judge.templates import fill_template, parts_of, parts_of_group
from agentgym.rewards.judge.verdicts import read_ranking, read_score, read_scores
from agentgym.rewards.reward import InvalidReward, Reward, RewardFailure
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.seeds import derive
from agentgym.trajectory import Trajectory
from agentgym.types import Message

__all__ = ["Judge"]


class Judge:
    """Asks for a verdict on each episode, or each group; one that cannot be parsed fails without a second request."""

    takes_environment = False

    def __init__(self, config: JudgeConfig, num_at_once: int) -> None:
        self.config = config
        self.together = config.unit == "group"
        self.num_at_once = 1 if self.together else num_at_once
        self._criteria = config.criteria()
        low, high = (f"{score:g}" for score in config.scale)
        rubric = "\n".join(f"- {criterion.name}: {criterion.text}" for criterion in self._criteria)
        self._template = fill_template(config.question(), {"rubric": rubric, "lowest": low, "highest": high})
        self._score = re.compile(config.score)
        self._endpoint = ChatEndpoint(config.url, ChatEndpointConfig(**asdict(config.endpoint)))
        self._free = asyncio.Semaphore(num_at_once)

    async def score(self, trajectories: Sequence[Trajectory], env: HostedEnv | None = None) -> Sequence[object]:
        if not self.together:
            return [await self._judge(trajectories[0])]
        groups: dict[str, list[int]] = {}
        for index, trajectory in enumerate(trajectories):
            groups.setdefault(trajectory.group, []).append(index)
        ranked = await asyncio.gather(
            *(self._rank([trajectories[index] for index in members]) for members in groups.values())
        )
        by_index = {
            index: value
            for members, values in zip(groups.values(), ranked, strict=True)
            for index, value in zip(members, values, strict=True)
        }
        return [by_index[index] for index in range(len(trajectories))]

    async def _judge(self, trajectory: Trajectory) -> Reward:
        """Returns the reward of one episode."""
        question = fill_template(self._template, parts_of(trajectory, self._template))
        verdict = await self._ask(question, f"judge-{trajectory.group}-{trajectory.member}")
        return self._read(verdict, trajectory)

    def _read(self, verdict: str, trajectory: Trajectory) -> Reward:
        (low, high), info = self.config.scale, {"verdict": verdict}
        if self._criteria:
            scores = read_scores(verdict, [criterion.name for criterion in self._criteria], low, high)
            total = math.fsum(criterion.weight * scores[criterion.name] for criterion in self._criteria)
            mean = total / math.fsum(criterion.weight for criterion in self._criteria)
            return Reward((mean - low) / (high - low), scores, info=info)
        if self.config.unit == "episode":
            score = read_score(verdict, self._score, low, high)
            return Reward((score - low) / (high - low), {"judge": score}, info=info)
        judged = [index for index, turn in enumerate(trajectory.turns) if not turn.asked]
        scores = read_scores(verdict, [f"Turn {number}" for number in range(1, len(judged) + 1)], low, high)
        turns = [0.0] * len(trajectory.turns)
        for index, score in zip(judged, scores.values(), strict=True):
            turns[index] = (score - low) / (high - low) / len(judged)
        mean = math.fsum(scores.values()) / len(judged)
        return Reward(math.fsum(turns), {"judge": mean}, turns=tuple(turns), info=info)

    async def _rank(self, members: Sequence[Trajectory]) -> Sequence[Reward | RewardFailure]:
        """Returns the rewards of a group's members by their rank.

        The answers are shown in an order that follows from the group's name and seed, so that a judge that prefers the
        first place prefers no member.
        """
        try:
            if len(members) < 2:
                raise RewardFailure("a ranking needs two members of a group, and only one has a reply")
            order = list(range(len(members)))
            random.Random(derive(members[0].task.seed, "judge", members[0].group)).shuffle(order)
            shuffled_members = [members[index] for index in order]
            question = fill_template(self._template, parts_of_group(shuffled_members, self._template))
            async with self._free:
                verdict = await self._ask(question, f"judge-{members[0].group}")
            rewards = dict(zip(order, read_ranking(verdict, len(members)), strict=True))
        except (RewardFailure, InvalidReward) as failure:
            return [RewardFailure(str(failure))] * len(members)
        return [
            Reward(
                rewards[index], {"judge": rewards[index]}, info={"verdict": verdict, "answer": order.index(index) + 1}
            )
            for index in range(len(members))
        ]

    async def _ask(self, question: str, session: str) -> str:
        """Returns the judge's verdict; raises RewardFailure without a whole one."""
        sampling = Sampling(max_tokens=self.config.max_tokens, temperature=self.config.temperature)
        try:
            reply = await self._endpoint.complete([Message("user", question)], sampling=sampling, session=session)
        except EndpointFailure as failure:
            raise RewardFailure(f"the judge gave no verdict: {failure}") from None
        if reply.finish_reason != "stop":
            raise RewardFailure(f"the judge's verdict was cut at {self.config.max_tokens} tokens (judge.max_tokens)")
        return reply.message.content

    async def close(self) -> None:
        await self._endpoint.close()
