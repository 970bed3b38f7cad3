"""The update of a step: forward, loss, backward, optimizer, as often as the step's episodes are gone over."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from agentgym.engines.hf_layout import PackedLayout
from agentgym.engines.hf_model import Decoder
from agentgym.trainers.batch import TrainingBatch
from agentgym.trainers.critic import Critic, CriticStats
from agentgym.trainers.halt import NotFinite
from agentgym.trainers.kl import penalty_of
from agentgym.trainers.learner_config import LearnerConfig
from agentgym.trainers.losses import LOSSES, LossStats, PolicyLoss, is_elementwise
from agentgym.trainers.mismatch import MismatchFound, MismatchSums
from agentgym.trainers.off_policy import corrected_batch
from agentgym.trainers.optimizer import OptimizerConfig, PolicyOptimizer
from agentgym.trainers.parallel import GradientWorkers, MicroResult
from agentgym.trainers.step_stats import Report, StepStats
from agentgym.trainers.token_logprobs import gradient_proxy, score_targets

__all__ = ["Learner", "LearnerConfig", "StepStats"]


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

    `reference` is the model of the KL term; without one the model as it is now is copied. `total_steps` counts batches.
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
        self.kl = config.kl.controller()
        self.reference: Decoder | None = None
        if config.kl.coefficient:
            self.reference = (reference or copy.deepcopy(model)).requires_grad_(False)
        on_cpu = model.embed.device.type == "cpu"
        self._workers = GradientWorkers(config.num_threads if on_cpu else 1)
        num_steps = total_steps * config.steps_per_batch
        self.critic: Critic | None = None
        if config.critic.exists:
            self.critic = Critic(
                model,
                config.critic,
                optimizer,
                total_steps=num_steps,
                micro_batch_tokens=config.micro_batch_tokens,
                workers=self._workers,
            )
        self._shared = self.critic if config.critic.trunk == "shared" else None
        further = () if self._shared is None else self._shared.head.parameters()
        self.optimizer = PolicyOptimizer(model, optimizer, num_steps, further)
        self._fresh_from = 0
        self._kl_of_rewards = 0.0
        self._loss = config.policy_loss
        self._kl_penalty = penalty_of(config.kl.penalty)
        self._elementwise = is_elementwise(LOSSES[config.loss_name])

    def update(self, batch: TrainingBatch, *, version: int = 0, max_mismatch: float = math.inf) -> StepStats:
        """Goes over the batch: `epochs` x `minibatches` optimizer steps of the policy.

        Raises NotFinite, with the weights as before the optimizer step, when that is not finite, and MismatchFound
        when the engine's logprobs in replies that began with policy `version` are further than `max_mismatch` nats from
        ours before the first one. (What a reply goes on with over an update may be sampled over an old cache, see
        `ServingSettings.pause`.)
        """
        self._fresh_from = version
        batch = self._corrected(batch, version)
        steps: list[StepStats] = []
        for _ in range(self.config.epochs):
            for part in batch.minibatches(self.config.minibatches):
                steps.append(self._step(part, math.inf if steps else max_mismatch))
        stats = StepStats.mean(steps)
        if self.config.kl.place == "reward":
            stats = replace(stats, kl=self._kl_of_rewards)
        self.kl = self.kl.update(stats.kl, len(batch.trajectory_N.unique()))
        return stats

    def update_critic(self, batch: TrainingBatch) -> CriticStats | None:
        """Fits the critic to the returns of the batch, as often as the policy is updated; None without a critic. One
        that shares the policy's trunk has learned in `update` already."""
        if self.critic is None:
            return None
        norms = [0.0]
        if self._shared is None:
            for _ in range(self.config.epochs):
                norms += [self.critic.update(part) for part in batch.minibatches(self.config.minibatches)]
        return self.critic.stats(batch, self.critic.read(batch)[0], max(norms))

    def penalties(self, batch: TrainingBatch) -> Tensor:
        """What the KL penalty takes off the reward of each trained target, `[M]` in units of reward, for `kl.place`
        reward; the `update` that follows moves the coefficient toward its target."""
        assert self.reference is not None
        reference_M = self._logprobs(self.reference, batch)
        nats_M = self._kl_penalty(batch.old_logp_N.cpu()[batch.mask_N.cpu()], reference_M.cpu())
        weighted_M = self.kl.coefficient * nats_M
        self._kl_of_rewards = float(nats_M.mean()) if len(nats_M) else 0.0
        return weighted_M

    @torch.no_grad()
    def gradient_proxies(self, batch: TrainingBatch) -> Tensor:
        """`1 - 2 p + sum p^2` of the batch's trained targets, `[M]`: the squared norm of the logits' gradient."""

        def one(part: TrainingBatch) -> Tensor:
            hidden_ME = self.model.hidden(part.ids_N, _layout(part))
            return gradient_proxy(hidden_ME, self.model.head_weight, part.target_N[part.mask_N], self.temperature)

        found = self._workers.map(one, batch.to(self.model.embed.device).split(self.config.micro_batch_tokens))
        return torch.cat(found) if found else torch.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` restores bitwise; the model itself is not in it."""
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "kl_coefficient": self.kl.coefficient}
        return state | ({} if self.critic is None else {"critic": self.critic.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the saved state of a learner of the same configuration."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.config.kl.coefficient:
            self.kl = replace(self.config.kl, coefficient=state["kl_coefficient"]).controller()
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far, those of a critic with its own among them."""
        further = None if self.critic is None else self.critic.optimizer
        return self.optimizer.num_steps + (0 if further is None else further.num_steps)

    def _step(self, batch: TrainingBatch, max_mismatch: float) -> StepStats:
        """One optimizer step."""
        parts = self._parts(batch)
        learning_rate = self.optimizer.learning_rate
        reports = self._workers.accumulate(parts, self._compute, self.optimizer.parameters)
        total = reduce(lambda first, second: first + second, reports)
        loss = float(total.loss)
        mismatch = total.mismatch.result
        if mismatch.max > max_mismatch:
            self._forget_gradients()
            raise MismatchFound(mismatch, max_mismatch)
        norm = self._workers.run(self.optimizer.step) if math.isfinite(loss) else math.nan
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self._forget_gradients()
            raise NotFinite(
                f"the loss ({loss}) or gradient norm ({norm}) is not finite; the weights are as before the"
                " optimizer step. Lower the learning rate, or look at the episodes of this step"
            )
        return total.result(batch.num_trained_tokens, norm, learning_rate, self.kl.coefficient)

    def _forget_gradients(self) -> None:
        for parameter in self.optimizer.parameters:
            parameter.grad = None

    def _corrected(self, batch: TrainingBatch, version: int) -> TrainingBatch:
        """The batch with what the off-policy correction makes of it; itself without one."""
        name = self.config.correction
        if name is None:
            return batch
        old_M = self._logprobs(self.model, batch).cpu()
        return corrected_batch(batch, old_M, version, name, self.config.correction_settings)

    @torch.no_grad()
    def logprobs(self, batch: TrainingBatch, temperature: float | None = None) -> Tensor:
        """Logprobs of the batch's trained targets under the current weights, `[number of trained targets]`; at the
        temperature of training, or at another one."""
        return self._logprobs(self.model, batch, temperature)

    def _logprobs(self, model: Decoder, batch: TrainingBatch, temperature: float | None = None) -> Tensor:
        parts = batch.to(model.embed.device).split(self.config.micro_batch_tokens)
        scores = self._workers.map(lambda part: self._logp(model, part, temperature), parts)
        return torch.cat(scores) if scores else torch.zeros(0)

    def close(self) -> None:
        """Ends the learner's threads."""
        self._workers.close()

    @torch.no_grad()
    def _logp(self, model: Decoder, part: TrainingBatch, temperature: float | None = None) -> Tensor:
        hidden_ME = model.hidden(part.ids_N, _layout(part))
        wanted = temperature or self.temperature
        return score_targets(hidden_ME, model.head_weight, part.target_N[part.mask_N], wanted).logp_N

    def _parts(self, batch: TrainingBatch) -> list[_Part]:
        """The micro-batches. A loss over the whole step is computed here, from one pass without gradient.

        Its derivative by each logprob is exact, and a micro-batch that carries these back has its share of the step's
        gradient, however the step is cut.
        """
        cut = batch.to(self.model.embed.device).split(self.config.micro_batch_tokens)
        if self._elementwise or not cut:
            return [_Part(part) for part in cut]
        logps = self._workers.map(lambda part: self._logp(self.model, part), cut)
        logp_M = torch.cat(logps).requires_grad_()
        names = ("old_logp_N", "advantage_N", "trajectory_N", "weight_N", "correction_N")
        old_M, advantage_M, trajectory_M, weight_M, correction_M = (
            torch.cat([getattr(part, name)[part.mask_N] for part in cut]) for name in names
        )
        all_M = torch.ones_like(logp_M, dtype=torch.bool)
        policy = self._loss(logp_M, old_M, advantage_M, all_M, sequences=trajectory_M)
        corrected_M = correction_M * policy.loss
        (slope_M,) = torch.autograd.grad((weight_M * corrected_M).sum(), logp_M)
        sizes = [len(one) for one in logps]
        losses, slopes = corrected_M.detach().split(sizes), (slope_M / weight_M).split(sizes)
        stats = [policy.stats] + [policy.stats.nothing] * (len(cut) - 1)
        found = (_Found(*one) for one in zip(losses, slopes, stats, strict=True))
        return [_Part(part, one) for part, one in zip(cut, found, strict=True)]

    def _policy_loss(self, micro: _Part, logp_M: Tensor) -> PolicyLoss:
        """The loss of each trained target, corrected."""
        if micro.found is not None:
            return micro.found.at(logp_M)
        part, mask_N = micro.batch, micro.batch.mask_N
        all_M = torch.ones_like(logp_M, dtype=torch.bool)
        policy = self._loss(logp_M, part.old_logp_N[mask_N], part.advantage_N[mask_N], all_M)
        if self.config.correction is None:
            return policy
        return PolicyLoss(part.correction_N[mask_N] * policy.loss, policy.stats)

    def _compute(self, micro: _Part) -> MicroResult[Report]:
        """The loss of a micro-batch: its share of the step's loss, so shares add up."""
        part, config = micro.batch, self.config
        mask_N, layout = part.mask_N, _layout(part)
        hidden_ME = self.model.hidden(part.ids_N, layout)
        scores = score_targets(hidden_ME, self.model.head_weight, part.target_N[mask_N], self.temperature)
        logp_M, entropy_M = scores.logp_N, scores.entropy_N
        policy = self._policy_loss(micro, logp_M)
        loss_M = policy.loss
        kl_M = torch.zeros_like(logp_M)
        if self.reference is not None and config.kl.place == "loss":
            kl_M = self._kl_penalty(logp_M, self._logp(self.reference, part))
            loss_M = loss_M + self.kl.coefficient * kl_M
        if config.entropy_coefficient:
            loss_M = loss_M - config.entropy_coefficient * entropy_M
        loss = (part.weight_N[mask_N] * loss_M).sum()
        if self._shared is not None:
            loss = loss + self._shared.config.coefficient * self._shared.loss(hidden_ME, part)
        correction_M = part.correction_N[mask_N]
        report = Report(
            loss=loss.detach(),
            entropy=entropy_M.detach().sum(),
            kl=kl_M.detach().sum(),
            mismatch=MismatchSums.of(
                logp_M.detach(), part.sampled_logp_N[mask_N], part.reply_version_N[mask_N] >= self._fresh_from
            ),
            stats=policy.stats,
            correction=correction_M.sum(),
            num_rejected=(correction_M == 0).sum(),
        )
        return MicroResult(loss, report)


def _layout(part: TrainingBatch) -> PackedLayout:
    return PackedLayout(part.seqlens, part.ids_N.device, ids_N=part.ids_N, wanted_N=part.mask_N)
