"""One optimizer step: forward, loss, backward, update."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from agentgym.engines.hf_layout import PackedLayout
from agentgym.engines.hf_model import Decoder
from agentgym.errors import ConfigError, TrainingHalted
from agentgym.trainers.batch import TrainingBatch
from agentgym.trainers.kl import penalty_of
from agentgym.trainers.losses import (
    LOSSES,
    LossStats,
    PolicyLoss,
    PolicyLossFn,
    is_elementwise,
    is_silent_at_zero,
    loss_with,
)
from agentgym.trainers.mismatch import MismatchFound, MismatchSums
from agentgym.trainers.optimizer import OptimizerConfig, PolicyOptimizer
from agentgym.trainers.parallel import GradientWorkers, MicroResult
from agentgym.trainers.token_logprobs import score_targets

__all__ = ["Learner", "LearnerConfig", "StepStats"]


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """What is minimized, and in which portions."""

    loss: str = "ppo_clip"
    """Policy loss, by its name in `LOSSES`, such as `ppo_clip`, `gspo` or `cispo`, or your own by its place,
    `path/to/file.py:name` or `package.module:name`."""
    loss_settings: Mapping[str, object] = field(default_factory=dict)
    """The settings of the loss by their names, such as clip_high=0.28; what is not named has its default."""
    kl_coefficient: float = 0.0
    """Weight of the KL term against the model that training began with; 0 keeps no reference model."""
    kl_penalty: str = "k3"
    """The KL term, by its name in `KL_PENALTIES`, such as k2, k3 or k3_st; k1 has no gradient in expectation, so it
    regularizes nothing; or your own by its place."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    micro_batch_tokens: int = 2048
    """Tokens of one forward pass; rows are never cut."""
    threads: int | None = None
    """CPU threads, each with micro-batches of its own; None is one per core, at most 8. Never changes a result."""

    def __post_init__(self) -> None:
        if self.micro_batch_tokens < 1:
            raise ConfigError(f"micro_batch_tokens is at least 1, got {self.micro_batch_tokens}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads is at least 1, got {self.threads}")
        penalty_of(self.kl_penalty)
        _ = self.policy_loss  # raises where the loss or a setting cannot work

    @property
    def policy_loss(self) -> PolicyLossFn:
        """The loss with its settings."""
        return loss_with(self.loss, self.loss_settings)

    @property
    def needs_all_rows(self) -> bool:
        """Whether rows with an advantage of 0 have a gradient too."""
        regularized = self.kl_coefficient != 0 or self.entropy_coefficient != 0
        return regularized or not is_silent_at_zero(LOSSES[self.loss])


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one update did; means are over the trained tokens of the batch, in nats."""

    loss: float
    grad_norm: float
    """Global 2-norm before clipping."""
    learning_rate: float
    entropy: float
    kl: float
    """Against the reference model; 0 without one."""
    clip_fraction: float
    ratio_max: float
    mismatch_mean: float
    """Mean |logprob of the trainer - logprob of the engine| over tokens of the newest weights: rounding alone."""
    mismatch_max: float
    mismatch_kl: float
    """Estimate of KL(engine || trainer) over the same tokens."""
    stale_tokens: int
    """Trained tokens of replies that began with older weights."""


@dataclass(frozen=True, eq=False)
class _Report:
    """Sums of one micro-batch."""

    loss: Tensor
    entropy: Tensor
    kl: Tensor
    mismatch: MismatchSums
    stats: LossStats

    def __add__(self, other: _Report) -> _Report:
        return _Report(
            loss=self.loss + other.loss,
            entropy=self.entropy + other.entropy,
            kl=self.kl + other.kl,
            mismatch=self.mismatch + other.mismatch,
            stats=self.stats + other.stats,
        )


@dataclass(frozen=True, eq=False)
class _Found:
    """The losses of some tokens of a step and their slope: near where they were computed, they are a straight line."""

    loss_M: Tensor
    slope_M: Tensor
    """The derivative of the step's loss by the token's logprob, per unit of the token's weight."""
    stats: LossStats

    def at(self, logp_M: Tensor) -> PolicyLoss:
        """The losses again, with the gradient that they have in the step."""
        return PolicyLoss(self.loss_M + self.slope_M * (logp_M - logp_M.detach()), self.stats)


@dataclass(frozen=True, eq=False)
class _Part:
    """A micro-batch, and what a loss over the whole step found for it."""

    batch: TrainingBatch
    found: _Found | None = None


class Learner:
    """Owns the optimizer of a live model; the engine that shares the model's tensors sees every update at once.

    `reference` is the model of the KL term; without one the model as it is now is copied.
    """

    def __init__(
        self,
        model: Decoder,
        config: LearnerConfig,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        temperature: float = 1.0,
        reference: Decoder | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.temperature = temperature
        self.optimizer = PolicyOptimizer(model, optimizer, total_steps)
        self.reference: Decoder | None = None
        if config.kl_coefficient:
            self.reference = (reference or copy.deepcopy(model)).requires_grad_(False)
        on_cpu = model.embed.device.type == "cpu"
        threads = config.threads or min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        self._fresh_from = 0
        self._loss = config.policy_loss
        self._kl_penalty = penalty_of(config.kl_penalty)
        self._elementwise = is_elementwise(LOSSES[config.loss])
        self._workers = GradientWorkers(threads if on_cpu else 1)

    def update(self, batch: TrainingBatch, *, version: int = 0, max_mismatch: float = math.inf) -> StepStats:
        """One optimizer step on the batch.

        Raises TrainingHalted, with the weights untouched, when it is not finite, and MismatchFound when the engine's
        logprobs in replies that began with policy `version` are further than `max_mismatch` nats from ours. (What a
        reply goes on with over an update may be sampled over an old cache, see `ServingSettings.pause`.)
        """
        self._fresh_from = version
        parts = self._parts(batch)
        learning_rate = self.optimizer.learning_rate
        reports = self._workers.accumulate(parts, self._compute, self.optimizer.parameters)
        total = reduce(lambda first, second: first + second, reports)
        loss, tokens = float(total.loss), max(1, batch.num_trained_tokens)
        mismatch = total.mismatch.result
        if mismatch.max > max_mismatch:
            self.model.zero_grad(set_to_none=True)
            raise MismatchFound(mismatch, max_mismatch)
        norm = self._workers.run(self.optimizer.step) if math.isfinite(loss) else math.nan
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self.model.zero_grad(set_to_none=True)
            raise TrainingHalted(
                f"the loss ({loss}) or gradient norm ({norm}) is not finite; the weights are as before the step."
                " Lower the learning rate, or look at the episodes of this step."
            )
        return StepStats(
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            entropy=float(total.entropy) / tokens,
            kl=float(total.kl) / tokens,
            clip_fraction=total.stats.clip_fraction,
            ratio_max=float(total.stats.ratio_max),
            mismatch_mean=mismatch.mean,
            mismatch_max=mismatch.max,
            mismatch_kl=mismatch.kl,
            stale_tokens=batch.num_trained_tokens - mismatch.num_tokens,
        )

    @torch.no_grad()
    def logprobs(self, batch: TrainingBatch, temperature: float | None = None) -> Tensor:
        """Logprobs of the batch's trained targets under the current weights, `[number of trained targets]`; at the
        temperature of training, or at another one."""
        parts = batch.to(self.model.embed.device).split(self.config.micro_batch_tokens)
        scores = [self._score(self.model, part, _layout(part), temperature)[0] for part in parts]
        return torch.cat(scores) if scores else torch.zeros(0)

    def close(self) -> None:
        """Ends the learner's threads."""
        self._workers.close()

    def _score(
        self, model: Decoder, part: TrainingBatch, layout: PackedLayout, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden_ME = model.hidden(part.ids_N, layout)
        wanted = temperature or self.temperature
        scores = score_targets(hidden_ME, model.head_weight, part.target_N[part.mask_N], wanted)
        return scores.logp_N, scores.entropy_N

    def _parts(self, batch: TrainingBatch) -> list[_Part]:
        """The micro-batches. A loss over the whole step is computed here, from one pass without gradient.

        Its derivative by each logprob is exact, and a micro-batch that carries these back has its share of the step's
        gradient, however the step is cut.
        """
        cut = batch.to(self.model.embed.device).split(self.config.micro_batch_tokens)
        if self._elementwise or not cut:
            return [_Part(part) for part in cut]
        logps = self._workers.map(self._logp, cut)
        logp_M = torch.cat(logps).requires_grad_()
        names = ("old_logp_N", "advantage_N", "trajectory_N", "weight_N")
        old_M, advantage_M, trajectory_M, weight_M = (
            torch.cat([getattr(part, name)[part.mask_N] for part in cut]) for name in names
        )
        all_M = torch.ones_like(logp_M, dtype=torch.bool)
        policy = self._loss(logp_M, old_M, advantage_M, all_M, sequences=trajectory_M)
        (slope_M,) = torch.autograd.grad((weight_M * policy.loss).sum(), logp_M)
        sizes = [len(one) for one in logps]
        losses, slopes = policy.loss.detach().split(sizes), (slope_M / weight_M).split(sizes)
        stats = [policy.stats] + [policy.stats.nothing] * (len(cut) - 1)
        found = (_Found(*one) for one in zip(losses, slopes, stats, strict=True))
        return [_Part(part, one) for part, one in zip(cut, found, strict=True)]

    @torch.no_grad()
    def _logp(self, part: TrainingBatch) -> Tensor:
        return self._score(self.model, part, _layout(part))[0]

    def _policy_loss(self, micro: _Part, logp_M: Tensor) -> PolicyLoss:
        if micro.found is not None:
            return micro.found.at(logp_M)
        part, mask_N = micro.batch, micro.batch.mask_N
        all_M = torch.ones_like(logp_M, dtype=torch.bool)
        return self._loss(logp_M, part.old_logp_N[mask_N], part.advantage_N[mask_N], all_M)

    def _compute(self, micro: _Part) -> MicroResult[_Report]:
        """The loss of a micro-batch: its share of the step's loss, so shares add up."""
        part, config = micro.batch, self.config
        mask_N, layout = part.mask_N, _layout(part)
        logp_M, entropy_M = self._score(self.model, part, layout)
        old_logp_M, weight_M = part.old_logp_N[mask_N], part.weight_N[mask_N]
        policy = self._policy_loss(micro, logp_M)
        loss_M = policy.loss
        kl_M = torch.zeros_like(logp_M)
        if self.reference is not None:
            with torch.no_grad():
                reference_M = self._score(self.reference, part, layout)[0]
            kl_M = self._kl_penalty(logp_M, reference_M)
            loss_M = loss_M + config.kl_coefficient * kl_M
        if config.entropy_coefficient:
            loss_M = loss_M - config.entropy_coefficient * entropy_M
        loss = (weight_M * loss_M).sum()
        fresh_M = part.reply_version_N[mask_N] >= self._fresh_from
        report = _Report(
            loss=loss.detach(),
            entropy=entropy_M.detach().sum(),
            kl=kl_M.detach().sum(),
            mismatch=MismatchSums.of(logp_M.detach(), old_logp_M, fresh_M),
            stats=policy.stats,
        )
        return MicroResult(loss, report)


def _layout(part: TrainingBatch) -> PackedLayout:
    return PackedLayout(part.seqlens, part.ids_N.device, ids_N=part.ids_N, wanted_N=part.mask_N)
