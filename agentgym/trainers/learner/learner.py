"""The update of a step: forward, loss, backward and optimizer, for each pass over the step's episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import islice
from operator import add
from typing import Any, Literal

import torch
from torch import Tensor

from agentgym.model.exchange import Exchange
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import published_views
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.routing import BatchRouting, experts_of_routers
from agentgym.trainers.algorithms.kl import penalty_of
from agentgym.trainers.algorithms.losses import LOSSES, PairSums, traits_of
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.batch.off_policy import corrected_batch
from agentgym.trainers.learner.critic import Critic, CriticStats
from agentgym.trainers.learner.finite import NotFinite
from agentgym.trainers.learner.lora import Adapters, Unadapted
from agentgym.trainers.learner.micro_batch import MicroBatch, parts_of_step
from agentgym.trainers.learner.mismatch import UNBOUNDED, MismatchBound, MismatchFound, MismatchSums
from agentgym.trainers.learner.objective import balance_weight, has_further_loss, policy_loss
from agentgym.trainers.learner.optimizer import PolicyOptimizer
from agentgym.trainers.learner.parameter_groups import ready_to_train
from agentgym.trainers.learner.reference import FinalStates, ReferenceModel, load_teacher, whole_divergence
from agentgym.trainers.learner.router_stats import RouterSums
from agentgym.trainers.learner.step_stats import Report, StepStats
from agentgym.trainers.learner.target_scores import TargetScores
from agentgym.trainers.learner.token_logprobs import gradient_proxy, scorer
from agentgym.trainers.parallel.gradient_threads import MicroResult
from agentgym.trainers.parallel.learner_ranks import Sharded, Share, learner_ranks, model_of
from agentgym.trainers.parallel.sharded_tensor import Gather, is_sharded, shard, whole
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["Learner", "LearnerConfig", "StepStats"]


class Learner:
    """Owns the optimizer of a live model; an engine that shares the model's tensors sees every update at once.

    A sharded model is trained by all of its ranks: each has a Learner, and all of them call the same methods with the
    same batches, in the same order. `reference` is the model of the KL term; without one, the model as it is now is
    copied; `elsewhere` has none here, since its logprobs come with each batch. `total_steps` counts batches.

    If adapters are trained (`config.lora`), the reference is the base, which stays unchanged: the adapters are added to
    it, and the model is kept equal to both merged. Without a reference they are added to the model itself, or, if that
    is sharded, were added before; `weights` returns the merged weights.
    """

    def __init__(
        self,
        model: LanguageModel | Sharded,
        config: LearnerConfig,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        temperature: float = 1.0,
        reference: LanguageModel | Sharded | Literal["elsewhere"] | None = None,
    ) -> None:
        self.model = model_of(model)
        self.ranks = learner_ranks(model, config)
        self.config = config
        initial_model = None if reference is None or reference == "elsewhere" else model_of(reference)
        self.adapters: Adapters | None = None
        if config.lora.rank:
            self.adapters = Adapters.of(self.model, initial_model, config.lora)
            self.model = self.adapters.model
        self.temperature = temperature
        self.kl = config.kl.controller()
        ready_to_train(self.model, config)
        self._balance = balance_weight(config, self.model.balance_coefficient)
        optimizer = optimizer.for_size(self.model.num_parameters)
        self.reference: ReferenceModel | None = None
        self._traits = traits_of(LOSSES[config.loss_name])
        if (config.kl.coefficient or self._traits.against_reference) and reference != "elsewhere":
            reference_model = self._reference_model(initial_model)
            self.reference = ReferenceModel(reference_model, config, temperature, self.ranks, self.model.vocab_size)
        num_steps = total_steps * config.steps_per_batch
        self.critic: Critic | None = None
        if config.critic.exists:
            sizes = {"total_steps": num_steps, "micro_batch_tokens": config.pass_tokens}
            backbone = self.model if config.critic.trunk == "shared" else self.ranks.copy(self.model)
            self.critic = Critic(backbone, config.critic, optimizer, ranks=self.ranks, **sizes)
        self._shared_critic = self.critic if config.critic.trunk == "shared" else None
        further = () if self._shared_critic is None else self._shared_critic.head.parameters()
        own = config.lora.optimizer_settings(optimizer)
        self.optimizer = PolicyOptimizer(self.model, own, num_steps, further, config.ema_decay)
        self._fresh_from, self._kl_of_rewards = 0, 0.0
        self._loss = policy_loss(config)
        self._score = scorer(config.head_kernel, self.model.softcap)
        self._kl_penalty = penalty_of("k2" if config.kl.compares_whole else config.kl.penalty)

    def _reference_model(self, initial_model: LanguageModel | None) -> LanguageModel | Unadapted:
        """The model of the KL term: a teacher, the base of adapters, or the first weights."""
        if (name := self.config.kl.reference) is not None:
            teacher = load_teacher(name, self.model)
            if not self.config.kl.compares_whole:  # whose head is read outside of its own pass
                self.ranks.spread(teacher)
            return teacher
        if self.adapters is not None:
            return self.adapters.reference
        if initial_model is None:
            return self.ranks.copy(self.model).requires_grad_(False)
        if not is_sharded(initial_model.embed):
            self.ranks.spread(initial_model)
        return initial_model.requires_grad_(False)

    @property
    def _reference(self) -> ReferenceModel:
        assert self.reference is not None, "a batch without the logprobs of a reference that is elsewhere"
        return self.reference

    def update(self, batch: TrainingBatch, *, version: int = 0, bound: MismatchBound = UNBOUNDED) -> StepStats:
        """Takes `epochs` x `minibatches` optimizer steps of the policy on the batch.

        Raises NotFinite, with the weights as before the optimizer step, if that is not finite. Raises MismatchFound if,
        before the first step, the engine's logprobs in replies that began with policy `version` are further from ours
        than the bound allows. (The rest of a reply that continues over an update may be sampled over an old
        cache, see `ServingSettings.pause`.)
        """
        self._fresh_from = version
        batch = self._correct_batch(batch, version)
        if self._traits.within_trajectory:
            batch = replace(batch, divides_trajectories=False)
        steps: list[StepStats] = []
        self.optimizer.skip_to(version * self.config.steps_per_batch)  # past those of batches without an update
        end = self.optimizer.position + self.config.steps_per_batch
        for _ in range(self.config.epochs):
            for part in batch.minibatches(self.config.minibatches):
                share = self._share(part)
                micros = self._parts(part, share)
                reports = self.ranks.accumulate(micros, self._compute, self.optimizer.parameters, share.sizes)
                total = self._total(reports, share.sizes)
                steps.append(self._take_step(total, part.num_trained_tokens, UNBOUNDED if steps else bound))
        self.optimizer.skip_to(end)  # a batch of few episodes has fewer minibatches
        stats = StepStats.mean(steps, self.config.epochs)
        if self.config.kl.place == "reward":
            stats = replace(stats, kl=self._kl_of_rewards)
        self.kl = self.kl.update(stats.kl, len(batch.trajectory_N.unique()))
        return stats if self.adapters is None else replace(stats, merge_lost=self.adapters.merge_lost)

    @torch.no_grad()
    def measure(self, batch: TrainingBatch) -> StepStats:
        """The statistics of the batch under the current weights, without an update."""
        if self._traits.within_trajectory:
            batch = replace(batch, divides_trajectories=False)
        share = self._share(batch)
        reports = self.ranks.map(lambda micro: self._compute(micro).report, self._parts(batch, share))
        total = self._total(reports, share.sizes)
        return total.result(batch.num_trained_tokens, 0.0, self.optimizer.learning_rate, self.kl.coefficient)

    def update_critic(self, batch: TrainingBatch) -> CriticStats | None:
        """Fits the critic to the returns of the batch, as often as the policy is updated; None without a critic."""
        return None if self.critic is None else self.critic.fit(batch, self.config.epochs, self.config.minibatches)

    def penalties(self, batch: TrainingBatch) -> Tensor:
        """The KL penalty to subtract from the reward of each trained target, `[M]` in units of reward.

        Used if `kl.place` is reward. The `update` that follows moves the coefficient toward its target divergence.
        """
        batch_logp_N = batch.reference_logp_N
        reference_M = self._reference.logprobs(batch) if batch_logp_N is None else batch_logp_N[batch.mask_N]
        nats_M = self._kl_penalty(batch.old_logp_N.cpu()[batch.mask_N.cpu()], reference_M.cpu())
        weighted_M = self.kl.coefficient * nats_M
        self._kl_of_rewards = float(nats_M.mean()) if len(nats_M) else 0.0
        return weighted_M

    @torch.no_grad()
    def gradient_proxies(self, batch: TrainingBatch) -> Tensor:
        """`1 - 2 p + sum p^2` of the batch's trained targets, `[M]`: the squared norm of the logits' gradient."""

        def read_part(part: TrainingBatch) -> Tensor:
            layout = self._layout(part)

            def read(hidden_OE: Tensor, head_VE: Tensor) -> Tensor:
                target_O = layout.exchange.own(part.target_N[part.trained_M])
                proxy_O = gradient_proxy(hidden_OE, head_VE, target_O, self.temperature, softcap=self.model.softcap)
                return layout.exchange.gather_entries(proxy_O)

            proxy_M: Tensor = self.model(part.ids_N, layout, read)
            return proxy_M

        return self._every_target(read_part, self._share(batch))

    def state_dict(self, gather: Gather = whole) -> dict[str, Any]:
        """The state that `load_state_dict` restores bitwise, in whole tensors; the next step may change them.

        The model itself is not in it. All ranks must call it; rank 0 gets the state, and the others get nothing. With
        `shard` for `gather`, each gets its shards of all tensors.
        """
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(gather), "kl_coefficient": self.kl.coefficient}
        state |= {} if self.critic is None else {"critic": self.critic.state_dict(gather)}
        state |= {} if self.adapters is None else {"lora": self.adapters.state_dict(gather)}
        return state if self.ranks.rank == 0 or gather is shard else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the saved state of a learner of the same configuration, on any number of ranks.

        All ranks are given the whole state, with tensors or with what reads them from a file.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        if self.config.kl.coefficient:
            self.kl = replace(self.config.kl, coefficient=state["kl_coefficient"]).controller()
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        if self.adapters is not None:
            self.adapters.load_state_dict(state["lora"])
            self.ranks.run(self.adapters.publish)

    def weights(self, *, trained_only: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields parameters under their published names, whole: all, or those with an adapter, merged.

        Without `trained_only` those without an adapter are yielded too. All ranks must iterate to the end; rank 0 gets
        the tensors, and the others get nothing.
        """
        adapters = self.adapters
        merged = None if adapters is None else adapters.merged_weights(adapted_only=trained_only)
        for name, tensor in merged or published_views(self.model, whole):
            if self.ranks.rank == 0:
                yield name, tensor

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps so far, including those of a critic with its own optimizer."""
        further = None if self.critic is None else self.critic.optimizer
        return self.optimizer.num_steps + (0 if further is None else further.num_steps)

    def _take_step(self, total: Report, num_tokens: int, bound: MismatchBound) -> StepStats:
        """Takes one optimizer step with the gradients of the micro-batches; `total` is the sum of their reports."""
        learning_rate = self.optimizer.learning_rate
        loss = float(total.loss)
        mismatch = total.mismatch.result
        if bound.excess(mismatch):
            self._forget_gradients()
            raise MismatchFound(mismatch, bound)
        is_rejected = int(total.num_rejected) == num_tokens and math.isfinite(loss)
        if is_rejected and not has_further_loss(self.config, self._balance):
            self._forget_gradients()  # all are 0, and momentum would move the weights
            return replace(total.result(num_tokens, 0.0, learning_rate, self.kl.coefficient), optimizer_steps=0)
        norm = self.ranks.run(self.optimizer.step) if math.isfinite(loss) else math.nan
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self._forget_gradients()
            raise NotFinite(
                f"the loss ({loss}) or gradient norm ({norm}) is not finite; the weights are as before the"
                " optimizer step. Lower the learning rate, or look at the episodes of this step"
            )
        if self.adapters is not None:
            self.ranks.run(self.adapters.publish)
        return total.result(num_tokens, norm, learning_rate, self.kl.coefficient)

    def _total(self, reports: Sequence[Report], sizes: Sequence[int]) -> Report:
        """The sums over all micro-batches of all ranks, the same on each, on the CPU: a GPU is read once."""
        rest = iter(reports)
        portions: list[Report] = [reduce(add, islice(rest, size)) for size in sizes or (len(reports),)]
        sums = [portion.scalars_K for portion in portions]
        if self.ranks.size > 1 or len(sums) > 1:
            sums = [scalars_K for sums_K in sums for scalars_K in self.ranks.gather_scalars(sums_K)]
        return reduce(add, [Report.of_scalars(scalars_K.cpu()) for scalars_K in sums])

    def _forget_gradients(self) -> None:
        for parameter in self.optimizer.parameters:
            parameter.grad = None

    def _correct_batch(self, batch: TrainingBatch, version: int) -> TrainingBatch:
        """Applies the off-policy correction to the batch; returns the batch itself without one."""
        name = self.config.correction
        if name is None:
            return batch
        old_M = self.logprobs(batch).cpu()
        return corrected_batch(batch, old_M, version, name, self.config.correction_settings)

    @torch.no_grad()
    def logprobs(self, batch: TrainingBatch, temperature: float | None = None) -> Tensor:
        """The logprobs of the batch's trained targets under the current weights, `[number of trained targets]`.

        They are at the temperature of training, or at another one.
        """
        return self._every_target(lambda part: self._logp(part, temperature), self._share(batch))

    def _share(self, batch: TrainingBatch) -> Share:
        return self.ranks.share(batch, self.config.pass_tokens)

    def _scores(
        self, hidden_OE: Tensor, head_VE: Tensor, part: TrainingBatch, exchange: Exchange, temperature: float
    ) -> TargetScores:
        """The policy's scores of all trained targets of a part, on whichever ranks their final states are."""
        scores = self._score(hidden_OE, head_VE, exchange.own(part.target_N[part.trained_M]), temperature)
        return TargetScores(exchange.gather_entries(scores.logp_N), exchange.gather_entries(scores.entropy_N))

    def _layout(self, part: TrainingBatch) -> PackedLayout:
        layout = self.ranks.layout(part.seqlens, part.on_cpu.ids_N, part.on_cpu.mask_N)
        if self.model.routers:
            recorded = part.experts_NRK
            experts_NRK = None if recorded is None else experts_of_routers(self.model.routers, recorded)
            layout.routing = BatchRouting(part.seqlens, experts_NRK)
        return layout

    def _every_target(self, work: Callable[[TrainingBatch], Tensor], share: Share) -> Tensor:
        """The results of `work` on micro-batches, for all trained targets of the batch, `[M]`."""
        return self.ranks.whole(self.ranks.map(work, share.parts)[: share.num_own], share.targets)

    def close(self) -> None:
        """Stops the learner's threads."""
        self.ranks.close()

    @torch.no_grad()
    def _logp(self, part: TrainingBatch, temperature: float | None = None) -> Tensor:
        layout, own_temperature = self._layout(part), temperature or self.temperature
        scores: TargetScores = self.model(
            part.ids_N, layout, lambda hidden, head: self._scores(hidden, head, part, layout.exchange, own_temperature)
        )
        return scores.logp_N

    def _parts(self, batch: TrainingBatch, share: Share) -> list[MicroBatch]:
        """The micro-batches of this rank's share of the batch, with their losses if the loss is over the whole step.

        Such a loss is computed here, from one pass without gradient. Its derivative by each logprob is exact, so that a
        micro-batch that propagates these back has its share of the step's gradient, however the step is split.
        """
        if self._traits.elementwise or self._traits.within_trajectory or not share.parts:
            return [MicroBatch(part, is_idle=share.is_idle(number)) for number, part in enumerate(share.parts)]
        return parts_of_step(batch, share, self._every_target(self._logp, share), self._loss, self.ranks)

    def _forward(self, part: TrainingBatch) -> tuple[TargetScores, Tensor, Tensor, RouterSums]:
        """The policy's scores of the targets, the loss of experts and of a shared critic, whole divergences, sums."""
        layout = self._layout(part)
        reference = self._reference.final_states(part) if self.config.kl.compares_whole else None

        def read(hidden_OE: Tensor, head_VE: Tensor) -> tuple[TargetScores, Tensor, Tensor]:
            scores = self._scores(hidden_OE, head_VE, part, layout.exchange, self.temperature)
            further, whole_M = torch.zeros(()), torch.zeros_like(scores.logp_N)
            if reference is not None:
                own, beta = FinalStates(hidden_OE, head_VE, self.model.softcap), self.config.kl.beta
                whole_M = layout.exchange.gather_entries(whole_divergence(own, reference, beta, self.temperature))
            if self._shared_critic is not None:
                further = self._shared_critic.config.coefficient * self._shared_critic.loss(hidden_OE, part)
            if layout.routing is not None and self._balance:
                further = further + self._balance * (part.row_weight_B * layout.routing.balance_loss_B).sum()
            return scores, further, whole_M

        outputs: tuple[TargetScores, Tensor, Tensor] = self.model(part.ids_N, layout, read)
        return *outputs, RouterSums.of(layout.routing, part.row_weight_B)

    def _compute(self, micro: MicroBatch) -> MicroResult[Report]:
        """The loss of a micro-batch: its share of the step's loss, so shares add up."""
        part, config = micro.batch, self.config
        place_M = part.trained_M
        reference_M, is_loss = None, config.kl.coefficient > 0 and config.kl.place == "loss"
        if (is_loss and not config.kl.compares_whole) or self._traits.against_reference:
            batch_logp_N = part.reference_logp_N
            reference_M = self._reference.logprobs_of(part) if batch_logp_N is None else batch_logp_N[place_M]
        (logp_M, entropy_M), further, kl_M, router = self._forward(part)
        if micro.is_idle:
            return MicroResult(0 * (logp_M.sum() + further), Report.nothing(router))
        correction_M = part.correction_N[place_M]
        if micro.found is not None:
            policy = micro.found.at(logp_M)
            loss_M = policy.loss
        else:
            all_M = torch.ones_like(logp_M, dtype=torch.bool)
            old_M = part.old_logp_N[place_M]
            if self._traits.against_reference and reference_M is not None:
                old_M = reference_M
            whole = {"sequences": part.trajectory_N[place_M]} if self._traits.within_trajectory else {}
            policy = self._loss(logp_M, old_M, part.advantage_N[place_M], all_M, **whole)
            loss_M = policy.loss if config.correction is None else correction_M * policy.loss
        if reference_M is not None:
            kl_M = self._kl_penalty(logp_M, reference_M)
        if is_loss:
            loss_M = loss_M + self.kl.coefficient * kl_M
        if config.entropy_coefficient:
            loss_M = loss_M - config.entropy_coefficient * entropy_M
        loss = (part.weight_N[place_M] * loss_M).sum() + further
        report = Report(
            loss=loss.detach(),
            entropy=entropy_M.detach().sum(),
            kl=kl_M.detach().sum(),
            mismatch=MismatchSums.of(
                logp_M.detach(), part.sampled_logp_N[place_M], part.reply_version_N[place_M] >= self._fresh_from
            ),
            stats=policy.stats,
            correction=correction_M.sum(),
            num_rejected=(correction_M == 0).sum(),
            pairs=policy.pairs or PairSums.nothing(loss),
            router=router,
        )
        return MicroResult(loss, report)
