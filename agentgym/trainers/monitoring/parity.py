"""The parity gate: checks at the start and at intervals that the engine samples from the trained weights."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Engine, WeightSync
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.errors import EngineError, TrainingHalted
from agentgym.trainers.batch.batch import TrainingBatch, plain_batch
from agentgym.trainers.learner.mismatch import Mismatch, MismatchBound, MismatchFound, MismatchSums
from agentgym.trainers.learner.policy_learner import PolicyLearner
from agentgym.trainers.settings.parity import ParityConfig
from agentgym.trajectory import Trajectory

__all__ = ["ParityGate", "RoundedBound", "fresh_batch"]

_log = logging.getLogger(__name__)
_START_MAX = 0.01
"""Nats of a token; more than rounding explains if both sides compute in float32."""
_LEAST_MAX = 1e-3
_MAX_MARGIN = 10.0
_DENSE_RMS, _MIXTURE_RMS = 0.1, 0.2
"""Nats; published means in bfloat16 are 0.011 to 0.036 (dense) and 0.064 (a mixture of experts), half as much."""
_LEAST_RMS = 0.01
_RMS_MARGIN = 2.5
_REMEMBERED = 11
"""The latest comparisons that a bound follows: the start and ten steps, then eleven steps."""
_ROUNDED_MEAN = 0.05
"""Nats a token; a difference of which rounding may be the cause."""
_CUT_MEAN = 1.0
"""Nats; top-p or top-k raises a logprob by -log of the kept probability, which on average is hardly as much."""
_CUT_BELOW = 0.05


class ProbePlayer(Protocol):
    """Plays the episodes of a probe."""

    async def probe(self, name: str, version: int) -> Sequence[Trajectory]:
        """Plays short episodes with policy `version`."""


class Publisher(Protocol):
    """Sends the trained weights to the engine."""

    async def publish(self, version: int) -> WeightSync:
        """Sends the current weights as `version`."""


@dataclass
class RoundedBound:
    """The bound of two sides that round differently, which follows what they differ by."""

    level: float
    """The most nats that are allowed, as a root mean square."""
    is_fixed: bool = False
    """True if `level` is the bound, whatever was seen."""
    seen: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """The root mean squares of the latest comparisons."""

    @classmethod
    def of(cls, config: ParityConfig, *, is_mixture: bool) -> RoundedBound:
        """Returns the bound of these settings before anything was seen."""
        return cls(config.max_rms or (_MIXTURE_RMS if is_mixture else _DENSE_RMS), config.max_rms is not None)

    @property
    def now(self) -> MismatchBound:
        """The bound of the next comparison."""
        if self.is_fixed or not self.seen:
            return MismatchBound(rms=self.level)
        return MismatchBound(rms=min(self.level, max(_LEAST_RMS, _RMS_MARGIN * median(self.seen))))


class GateParts(Protocol):
    """The two sides that are compared."""

    @property
    def engine(self) -> Engine:
        """The engine that samples."""

    @property
    def learner(self) -> PolicyLearner:
        """The learner that trains."""


class ParityGate:
    """Compares the logprobs of engine and learner, and finds the cause if they differ."""

    def __init__(
        self,
        config: ParityConfig,
        parts: GateParts,
        player: ProbePlayer,
        publisher: Publisher,
        *,
        is_mixture: bool = False,
    ) -> None:
        self.config = config
        types = {parts.engine.dtype} if isinstance(parts.engine, ReplicatedEngine) else set()
        self._is_exact = types | {parts.learner.config.compute_dtype} == {"float32"}
        self._bound: MismatchBound | RoundedBound = RoundedBound.of(config, is_mixture=is_mixture)
        if self._is_exact or config.max_mismatch:
            self._bound = MismatchBound(token=config.max_mismatch or _START_MAX)
        self._engine = parts.engine
        self._learner = parts.learner
        self._player = player
        self._publisher = publisher

    @property
    def current_bound(self) -> MismatchBound:
        """The mismatch with which training continues."""
        return self._bound.now if isinstance(self._bound, RoundedBound) else self._bound

    def note(self, rms: float) -> None:
        """Adds a comparison that was within the bound to those that the bound follows, if it follows any."""
        if isinstance(self._bound, RoundedBound):
            self._bound.seen.append(rms)

    async def start(self, version: int) -> Mismatch:
        """Runs the first probe, which sets the bound; raises TrainingHalted that names the likely cause."""
        mismatch = await self.probe("start", version)
        if self.current_bound.excess(mismatch):
            await self.refuse(MismatchFound(mismatch, self.current_bound), version)
        if self._is_exact and not self.config.max_mismatch:
            self._bound = MismatchBound(token=max(_LEAST_MAX, _MAX_MARGIN * mismatch.max))
        self.note(mismatch.rms)
        return mismatch

    async def check(self, step: int, version: int) -> None:
        """Runs a probe if one is due; raises TrainingHalted that names the likely cause."""
        if step % self.config.every == 0:
            mismatch = await self.probe(f"probe-{step}", version)
            if self.current_bound.excess(mismatch):
                await self.refuse(MismatchFound(mismatch, self.current_bound), version)

    def check_versions(self, trajectories: Sequence[Trajectory], version: int, *, staleness: int = 0) -> None:
        """Raises TrainingHalted if a token has a policy version that the engine should not have any more, or yet."""
        for trajectory in trajectories:
            for row in trajectory.rows:
                versions = [number for span in row.spans for number in span.policy_versions or ()]
                for sampled_version in (min(versions, default=version), max(versions, default=version)):
                    if not version - staleness <= sampled_version <= version:
                        bound = f", and may be {staleness} updates older" if staleness else ""
                        raise TrainingHalted(
                            f"stale weights: a reply that was sampled at policy version {version} bears version"
                            f" {sampled_version}{bound}: the update of the engine's weights was skipped, "
                            "or another client made one"
                        )

    async def probe(self, name: str, version: int) -> Mismatch:
        """Plays a probe and returns the mismatch of its replies."""
        trajectories = await self._player.probe(name, version)
        self.check_versions(trajectories, version)
        return self._mismatch(fresh_batch(trajectories))

    async def refuse(self, mismatch: MismatchFound, version: int, batch: TrainingBatch | None = None) -> None:
        """Raises TrainingHalted with the likely cause of a mismatch, found by experiments.

        `batch` is the one in which the mismatch was found.
        """
        try:
            cause = await self._cause(mismatch, version, batch)
        except (EngineError, TrainingHalted) as error:
            cause = f"unknown, for the engine failed when asked again: {error}"
        raise TrainingHalted(f"{mismatch}. Likely cause: {cause}") from mismatch

    async def _cause(self, mismatch: MismatchFound, version: int, batch: TrainingBatch | None) -> str:
        if batch is None:
            batch = fresh_batch(await self._player.probe("cause", version))
        for temperature in (1.0, 0.6, 0.7, 0.8):
            if temperature != self._learner.temperature and self._is_met(self._mismatch(batch, temperature)):
                return (
                    f"temperature: the engine's logprobs are those of temperature {temperature:g}, and training"
                    f" computes them at {self._learner.temperature:g}"
                )
        if self._only_above(batch):
            return (
                "top-p or top-k: the engine's logprobs are never below the trainer's, as when they are those of a"
                " distribution that was cut and renormalized"
            )
        if isinstance(self._engine, ReplicatedEngine):
            await self._engine.flush()
            if self._is_met(await self.probe("flushed", version)):
                return "stale KV cache: with an emptied prefix cache they agree; it was not flushed after an update"
            await self._publisher.publish(version)
            if self._is_met(await self.probe("published", version)):
                return "stale weights: after sending them again they agree; a part of the last update was lost"
        if cause := await self._routing_cause(version):
            return cause
        if mismatch.mismatch.mean < _ROUNDED_MEAN:
            return (
                "dtype: the difference is the size of rounding; give trainer and engine the same dtype, or raise"
                f" parity.{'max_mismatch' if math.isfinite(mismatch.bound.token) else 'max_rms'}"
            )
        return "template or model: the engine reads other ids than were recorded, or serves another model"

    async def _routing_cause(self, version: int) -> str | None:
        """Returns the cause if the learner agrees with the engine as soon as it takes the engine's experts."""
        if not isinstance(self._engine, LocalEngine) or not self._engine.model.num_chosen():
            return None
        self._engine.record_experts()
        batch = fresh_batch(await self._player.probe("experts", version))
        own, replayed = self._mismatch(replace(batch, experts_NRK=None)), self._mismatch(batch)
        if not self._is_met(replayed) and replayed.mean > own.mean / 2:
            return None
        return (
            f"routing: engine and trainer give tokens to different experts; with the engine's they differ by"
            f" {replayed.max:.3g} nats, which is what --learner.router.replay trains with"
        )

    def _mismatch(self, batch: TrainingBatch, temperature: float | None = None) -> Mismatch:
        gap = self._logp(batch, temperature), _old(batch)
        return MismatchSums.of(*gap, torch.ones_like(gap[0], dtype=torch.bool)).result

    def _is_met(self, mismatch: Mismatch) -> bool:
        return self.current_bound.excess(mismatch) is None

    def _only_above(self, batch: TrainingBatch) -> bool:
        gap_M = _old(batch) - self._logp(batch, None)
        above, below = float(gap_M.clamp(min=0).mean()), float(-gap_M.clamp(max=0).mean())
        return 0 < above < _CUT_MEAN and below < _CUT_BELOW * above

    def _logp(self, batch: TrainingBatch, temperature: float | None) -> Tensor:
        return self._learner.logprobs(batch, temperature).cpu()


def fresh_batch(trajectories: Sequence[Trajectory]) -> TrainingBatch:
    """Returns all sampled tokens of the trajectories as a batch, whatever their rewards.

    Raises EngineError if no episode has a sampled token: then nothing can be compared.
    """
    played = [
        trajectory for trajectory in trajectories if trajectory.status.trainable and trajectory.num_trained_tokens
    ]
    if not played:
        errors = "; ".join(sorted({str(trajectory.error) for trajectory in trajectories})[:3])
        raise EngineError(f"no episode of a probe could be played: {errors}")
    return plain_batch(played)


def _old(batch: TrainingBatch) -> Tensor:
    return batch.sampled_logp_N[batch.mask_N]
