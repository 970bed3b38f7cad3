"""An engine that reports its requests to a clock."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.engines.protocol import Completion, Engine, Sampling, WeightSync
from agentgym.model.published_weights import Weights
from agentgym.trainers.speed.clock import StepClock

__all__ = ["MeteredEngine"]


class MeteredEngine:
    """A wrapper of an engine that counts every request on `clock`."""

    def __init__(self, engine: Engine, clock: StepClock) -> None:
        self.engine = engine
        self.clock = clock
        self.takes_grammar = bool(getattr(engine, "takes_grammar", False))

    @property
    def vocab_size(self) -> int:
        """The engine's vocabulary size."""
        return self.engine.vocab_size

    @property
    def context_window(self) -> int:
        """The engine's context window, in tokens."""
        return self.engine.context_window

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Returns the engine's reply, and counts the request on the clock."""
        with self.clock.doing("engine"):
            return await self.engine.generate(prompt_ids, sampling, session=session)

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Updates the engine's weights."""
        return await self.engine.update_weights(weights, version)

    async def pause(self) -> None:
        """Pauses the engine."""
        await self.engine.pause()

    async def resume(self) -> None:
        """Resumes the engine."""
        await self.engine.resume()

    async def abort(self, session: str) -> None:
        """Aborts the request of a session."""
        await self.engine.abort(session)

    async def close(self) -> None:
        """Closes the engine."""
        await self.engine.close()
