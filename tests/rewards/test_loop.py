"""Episodes are scored as soon as they are over, by real loops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.errors import TrainingHalted
from agentgym.rewards import RewardConfig, RewardedLoop, open_rewards
from agentgym.rollout import Episode, RolloutLoop, Sampler, SamplerConfig
from agentgym.rollout.episode.episode_loop import SURPLUS
from agentgym.trajectory import Group, Status, Trajectory
from agentgym.types import Task

TASKS = [Task("Ask-v0", seed) for seed in range(3)]


class Ask(TextEnv):
    """Asks twice; ends after the second reply with reward 1, and breaks at the seed 99."""

    runs_inline = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self.number = seed
        return "Well?", {}

    def step(self, action: str) -> StepResult:
        if self.number == 99:
            raise RuntimeError("broken")
        return "And?", float(self.turns == 2), self.turns == 2, False, {"metrics": {"success": 1.0}}


@pytest.fixture(scope="module")
def renderer(tokenizer_folder: Any) -> Renderer:
    return renderer_for(tokenizer_folder)


def sample(renderer: Renderer, function: Any, tasks: list[Task] = TASKS, rate: float = 1.0) -> list[Group]:
    async def main() -> list[Group]:
        engine = ScriptedEngine(lambda *_: (65, *renderer.stop_ids[:1]), context_window=1 << 16)
        async with open_rewards(RewardConfig(), function) as rewards:
            sampler = Sampler(
                rewards.loop(RolloutLoop(engine, renderer)), lambda task: Ask(), SamplerConfig(max_failure_rate=rate)
            )
            try:
                groups = await sampler.sample(tasks, 2)
                return await rewards.score_groups(groups) if rewards.together else groups
            finally:
                sampler.close()

    return asyncio.run(main())


def by_seed(trajectory: Trajectory, task: Task) -> float:
    assert trajectory.reward == 1.0
    return 0.5 + task.seed


def by_seeds(trajectories: list[Trajectory], tasks: list[Task]) -> list[float]:
    assert len(trajectories) == 2 * len(TASKS)
    return [by_seed(trajectory, task) for trajectory, task in zip(trajectories, tasks, strict=True)]


@pytest.mark.parametrize("function", [by_seed, by_seeds])
def test_the_functions_reward_replaces_the_environments(renderer: Renderer, function: Any) -> None:
    groups = sample(renderer, function)
    assert [[trajectory.reward for trajectory in group.trajectories] for group in groups] == [
        [0.5] * 2,
        [1.5] * 2,
        [2.5] * 2,
    ]
    played = groups[1].trajectories[0]
    assert [turn.reward for turn in played.turns] == [0.0, 1.5]
    assert (played.info["environment_reward"], played.metrics["success"]) == (1.0, 1.0)


def test_an_episode_that_failed_is_not_scored(renderer: Renderer) -> None:
    (group,) = sample(renderer, by_seed, [Task("Ask-v0", 99)])
    assert {trajectory.status for trajectory in group.trajectories} == {Status.ENV_ERROR}
    assert all("broken" in str(trajectory.error) for trajectory in group.trajectories)


def test_rewards_that_keep_failing_stop_the_run(renderer: Renderer) -> None:
    def breaks(trajectory: Trajectory, task: Task) -> float:
        raise LookupError("no table")

    with pytest.raises(TrainingHalted, match="the reward failed: LookupError: no table"):
        sample(renderer, breaks, rate=0.5)


def test_an_episode_is_scored_while_others_still_play(renderer: Renderer) -> None:
    """The second episode waits in its environment until the first one is scored: else neither would end."""

    async def main() -> list[Trajectory]:
        scored = asyncio.Event()

        class Waits(TextEnv):
            async def areset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, Info]:
                self.number = seed
                return "Well?", {}

            async def astep(self, action: str) -> StepResult:
                if self.number == 1:
                    await asyncio.wait_for(scored.wait(), 60)
                return "Bye.", 1.0, True, False, {}

        async def score(trajectory: Trajectory, task: Task) -> float:
            scored.set()
            return 2.0

        engine = ScriptedEngine(lambda *_: (65, *renderer.stop_ids[:1]), context_window=1 << 16)
        async with open_rewards(RewardConfig(), score) as rewards:
            sampler = Sampler(rewards.loop(RolloutLoop(engine, renderer)), lambda task: Waits())
            groups = await sampler.sample(TASKS[:2], 1)
            sampler.close()
        return [group.trajectories[0] for group in groups]

    assert [trajectory.reward for trajectory in asyncio.run(main())] == [2.0, 2.0]


def test_a_surplus_episode_that_is_being_scored_ends_as_cancelled(renderer: Renderer) -> None:
    async def main() -> Trajectory:
        begun = asyncio.Event()

        async def never(trajectory: Trajectory, task: Task) -> float:
            begun.set()
            await asyncio.Event().wait()
            return 1.0

        engine = ScriptedEngine(lambda *_: (65, *renderer.stop_ids[:1]), context_window=1 << 16)
        async with open_rewards(RewardConfig(), never) as rewards:
            loop = rewards.loop(RolloutLoop(engine, renderer))
            playing = asyncio.ensure_future(loop.run(Ask(), Episode(TASKS[0])))
            await begun.wait()
            playing.cancel(SURPLUS)
            return await playing

    cancelled = asyncio.run(main())
    assert (cancelled.status, cancelled.reward, len(cancelled.turns)) == (Status.CANCELLED, None, 2)


def test_without_rewards_the_loop_is_the_inner_one(renderer: Renderer) -> None:
    async def main() -> None:
        inner = RolloutLoop(ScriptedEngine(lambda *_: (65,), context_window=64), renderer)
        async with open_rewards(RewardConfig()) as rewards:
            assert rewards.loop(inner) is inner
        async with open_rewards(RewardConfig(function="format", settings={"tags": ["answer"]})) as rewards:
            scoring = rewards.loop(inner)
            assert isinstance(scoring, RewardedLoop)
            assert scoring.limits is inner.limits

    asyncio.run(main())
