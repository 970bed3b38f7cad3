"""Simulates episodes that take virtual time and no computation, to measure the code that schedules them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from agentgym.engines.protocol import Completion, Sampling, WeightSync
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.model.published_weights import Weights
from agentgym.rollout.episode.episode import Episode, EpisodeBuilder, EpisodeEnd
from agentgym.rollout.episode.episode_loop import EpisodeLoop
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.trajectory import Status, StopReason
from agentgym.types import Message, Task

__all__ = ["ENV_ID", "LogNormalSeconds", "SimulatedEngine", "SimulatedEnv", "SimulatedLoop", "simulated_sampler"]

WINDOW = 1 << 20
ENV_ID = "Simulated-v0"


class LogNormalSeconds:
    """The seconds of a reply by its seed: `LogNormalSeconds(median_s=1.0, sigma=1.0)`."""

    def __init__(self, median_s: float, sigma: float) -> None:
        self.median_s = median_s
        self.sigma = sigma

    def __call__(self, seed: int) -> float:
        return self.median_s * random.Random(seed).lognormvariate(0.0, self.sigma)


async def simulated_sampler(
    seconds: Callable[[int], float],
    *,
    make: Callable[[Task], SimulatedEnv],
    concurrency: int,
    deadline_s: float = 1e9,
) -> tuple[Sampler, SimulatedEngine]:
    """Returns a sampler of simulated episodes and its engine.

    It has played one episode: the first environment of a name is made on a thread, for which a virtual clock does not
    wait.
    """
    engine = SimulatedEngine(seconds)
    loop = SimulatedLoop(engine, Limits(max_turns=16, deadline_s=deadline_s))
    sampler = Sampler(loop, make, SamplerConfig(concurrency=concurrency))
    await sampler.play(Episode(Task(ENV_ID, 0), "warm-up", phase="warm-up"))
    return sampler, engine


class SimulatedEngine:
    """An Engine whose replies are two ids: the first is sampled at the request, the second at the answer."""

    vocab_size = 8
    context_window = WINDOW

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self._running = asyncio.Event()
        self._running.set()
        self.version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Returns a reply after the seconds of the sampling's seed, and those of a pause."""
        first = self.version
        await asyncio.sleep(self._seconds(sampling.seed))
        await self._running.wait()
        return Completion((5, 2), (-0.5, -0.5), (first, self.version), "stop")

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Sets the version of the ids from now on."""
        self.version = version
        return WeightSync(version=version)

    async def pause(self) -> None:
        """Lets no reply end until `resume`."""
        self._running.clear()

    async def resume(self) -> None:
        """Lets replies end again."""
        self._running.set()

    async def abort(self, session: str) -> None:
        """Does nothing: a session holds no state."""

    async def close(self) -> None:
        """Does nothing: there is nothing to release."""


class SimulatedEnv(TextEnv):
    """An environment that succeeds after `num_turns` turns."""

    runs_inline = True

    def __init__(self, num_turns: int = 1, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self._num_turns = num_turns

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[str, Info]:
        """Begins an episode."""
        self._turns_left = self._num_turns
        return "begin", {}

    def step(self, action: str) -> StepResult:
        """Counts a turn down."""
        self._turns_left -= 1
        return "go on", float(self._turns_left == 0), self._turns_left == 0, False, {}


class SimulatedLoop(EpisodeLoop):
    """Plays episodes with the bookkeeping of real ones, without rendering or parsing."""

    def __init__(self, engine: SimulatedEngine, limits: Limits) -> None:
        super().__init__(limits)
        self.engine = engine

    async def _converse(self, env: HostedEnv, builder: EpisodeBuilder) -> EpisodeEnd:
        await self._reset(env, builder)
        builder.begin_row((1, 3))
        message = Message("assistant", "on")
        for turn in range(self.limits.max_turns):
            sampling = Sampling(max_tokens=2, seed=builder.episode.seed(turn))
            completion = await self.engine.generate(builder.ids, sampling, session=builder.episode.session)
            await self.fair_gate.wait_turn()
            builder.add_reply(completion, message, 0.0)
            ending = self._ending(await self._act(env, builder, message), len(builder.turns))
            if ending is not None:
                return ending
            builder.add_answer((4,))
        return EpisodeEnd(Status.TRUNCATED, StopReason.MAX_TURNS)

    async def _end_session(self, session: str) -> None:
        await self.engine.abort(session)

    async def close(self) -> None:
        """Closes the engine."""
        await self.engine.close()
