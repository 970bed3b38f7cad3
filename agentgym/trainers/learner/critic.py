"""A critic: predicts the reward that is still to come, before every sampled token.

A value is stored at its TARGET token, as everything in a `TrainingBatch`: it is computed from the state that has seen
all ids before the target and not the target itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from agentgym.errors import ConfigError
from agentgym.model.exchange import ALONE, Exchange
from agentgym.model.language_model import LanguageModel
from agentgym.trainers.algorithms.losses.value import value_clip
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.finite import NotFinite
from agentgym.trainers.learner.optimizer import PolicyOptimizer
from agentgym.trainers.parallel.gradient_threads import MicroResult
from agentgym.trainers.parallel.learner_ranks import LearnerRanks
from agentgym.trainers.parallel.sharded_tensor import Gather, Stored, like, whole
from agentgym.trainers.settings.critic import RATE, CriticConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["Critic", "CriticStats", "ValueHead"]


# Shape suffixes: N packed tokens, M trained targets, E model width, R rows.


@dataclass(frozen=True, kw_only=True)
class CriticStats:
    """The statistics of one update of a critic, over the trained tokens of the step; in units of reward."""

    value_loss: float
    """Half the mean squared error before the update, clipped as configured."""
    value_clip_fraction: float
    value_grad_norm: float
    value_mean: float
    return_mean: float
    explained_variance: float
    """`1 - var(returns - values) / var(returns)` of the values that advantages were computed with: 1 for a perfect
    critic, 0 for a constant one, and 0 where all returns are equal."""


class ValueHead(nn.Module):
    """A linear head that maps a final state to one number; 0 before its first update."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight_E = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_OE: Tensor, exchange: Exchange = ALONE) -> Tensor:
        """The values, float32 `[M]`, of all entries of a pass: of this process, or of all ranks that share the pass."""
        weight_E, bias = exchange.weight(self.weight_E), exchange.weight(self.bias)
        return exchange.gather_entries(hidden_OE.float() @ weight_E.float() + bias.float())


class Critic:
    """Computes and fits values of trained targets; a shared backbone is the policy, and one of its own is changed."""

    def __init__(
        self,
        backbone: LanguageModel,
        config: CriticConfig,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        micro_batch_tokens: int,
        ranks: LearnerRanks,
    ) -> None:
        self.config = config
        self.head = ValueHead(backbone.width).to(backbone.embed.device)
        ranks.spread(self.head)
        self.backbone = backbone
        self.optimizer: PolicyOptimizer | None = None
        if config.trunk == "own":
            rate = config.learning_rate or RATE * optimizer.peak_rate
            settings = replace(optimizer, learning_rate=rate)
            self.optimizer = PolicyOptimizer(self.backbone, settings, total_steps, self.head.parameters())
        self._micro_batch_tokens = micro_batch_tokens
        self._ranks = ranks

    @torch.no_grad()
    def read(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """The values of the batch's trained targets, `[M]`, and those after the last id of each row, `[R]`."""
        share = self._ranks.share(batch, self._micro_batch_tokens)
        pairs = self._ranks.map(self._read, share.parts)[: share.num_own]
        values_M = self._ranks.whole([one_M for one_M, _ in pairs], share.targets)
        return values_M, self._ranks.whole([end_R for _, end_R in pairs], share.rows)

    def fit(self, batch: TrainingBatch, epochs: int, minibatches: int) -> CriticStats:
        """Updates a backbone of its own `epochs` x `minibatches` times on the batch; returns the statistics of both.

        A shared backbone was updated with the policy.
        """
        norms = [0.0]
        if self.optimizer is not None:
            end = self.optimizer.position + epochs * minibatches
            for _ in range(epochs):
                norms += [self.update(part) for part in batch.minibatches(minibatches)]
            self.optimizer.skip_to(end)
        return self.stats(batch, self.read(batch)[0], max(norms))

    def update(self, batch: TrainingBatch) -> float:
        """Takes one optimizer step of a backbone of its own toward the batch's returns; returns the gradient's norm.

        Raises NotFinite, with the weights unchanged, if the norm or the loss is not finite.
        """
        assert self.optimizer is not None
        share = self._ranks.share(batch, self._micro_batch_tokens)
        parts = [(part, share.is_idle(number)) for number, part in enumerate(share.parts)]
        losses = reduce(add, self._ranks.accumulate(parts, self._compute, self.optimizer.parameters, share.sizes))
        loss = float(reduce(add, self._ranks.gather_scalars(losses)))
        norm = self._ranks.run(self.optimizer.step) if math.isfinite(loss) else math.nan
        if not math.isfinite(norm):
            for parameter in self.optimizer.parameters:
                parameter.grad = None
            raise NotFinite(
                f"the critic's loss ({loss}) or gradient norm ({norm}) is not finite; its weights are as before. Lower"
                " critic.learning_rate, or look at the rewards of this step"
            )
        return norm

    def loss(self, hidden_OE: Tensor, part: TrainingBatch, exchange: Exchange = ALONE) -> Tensor:
        """The value loss of the trained targets, weighted as the policy's loss is; a scalar."""
        place_M = part.trained_M
        values_M = self.head(hidden_OE, exchange)
        old_M, return_M = part.old_value_N[place_M], part.return_N[place_M]
        result = value_clip(
            values_M, old_M, return_M, torch.ones_like(values_M, dtype=torch.bool), clip=self.config.clip
        )
        return (part.weight_N[place_M] * result.loss).sum()

    def stats(self, batch: TrainingBatch, values_M: Tensor, grad_norm: float) -> CriticStats:
        """The statistics of an update; `values_M` are the critic's values after it."""
        mask_N = batch.mask_N.cpu()
        old_M, return_M = batch.old_value_N.cpu()[mask_N], batch.return_N.cpu()[mask_N]
        result = value_clip(
            values_M.cpu(), old_M, return_M, torch.ones_like(old_M, dtype=torch.bool), clip=self.config.clip
        )
        spread = float(return_M.double().var(correction=0)) if len(return_M) else 0.0
        error = float((return_M - old_M).double().var(correction=0)) if len(return_M) else 0.0
        num_tokens = max(1, len(return_M))
        return CriticStats(
            value_loss=0.5 * float((return_M - old_M).square().sum()) / num_tokens,
            value_clip_fraction=float(result.clipped) / num_tokens,
            value_grad_norm=grad_norm,
            value_mean=float(old_M.sum()) / num_tokens,
            return_mean=float(return_M.sum()) / num_tokens,
            explained_variance=1 - error / spread if spread else 0.0,
        )

    def state_dict(self, gather: Gather = whole) -> dict[str, Any]:
        """The state that `load_state_dict` restores bitwise, in whole tensors or shards.

        A shared backbone is the policy's and is saved with it.
        """
        state: dict[str, Any] = {"head": _module_state(self.head, gather)}
        if self.optimizer is not None:
            trunk = _module_state(self.backbone, gather)
            state |= {"trunk": trunk, "optimizer": self.optimizer.state_dict(gather)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the saved state of a critic of the same configuration."""
        _load_whole(self.head, state["head"])
        if self.optimizer is not None:
            _load_whole(self.backbone, state["trunk"])
            self.optimizer.load_state_dict(state["optimizer"])

    def _read(self, part: TrainingBatch) -> tuple[Tensor, Tensor]:
        """The values of the part; each row is computed with its last id too, for the value after the row."""
        ids, target_masks = [], []
        rows = (tensor.split(part.seqlens) for tensor in (part.ids_N, part.target_N, part.mask_N))
        for ids_T, target_T, mask_T in zip(*rows, strict=True):
            ids.append(torch.cat([ids_T, target_T[-1:]]))
            target_masks.append(torch.cat([mask_T, torch.ones_like(mask_T[-1:])]))
        ids_N, mask_N = torch.cat(ids), torch.cat(target_masks)
        seqlens = [length + 1 for length in part.seqlens]
        layout = self._ranks.layout(seqlens, ids_N, mask_N)
        value_W: Tensor = self.backbone(ids_N, layout, lambda hidden_OE, _: self.head(hidden_OE, layout.exchange))
        is_end_N = torch.cat([torch.arange(length + 1, device=ids_N.device) == length for length in part.seqlens])
        is_end_W = is_end_N[mask_N]
        return value_W[~is_end_W], value_W[is_end_W]

    def _compute(self, marked_part: tuple[TrainingBatch, bool]) -> MicroResult[Tensor]:
        part, is_idle = marked_part
        layout = self._ranks.layout(part.seqlens, part.ids_N, part.mask_N)
        loss: Tensor = self.backbone(
            part.ids_N, layout, lambda hidden_OE, _: self.loss(hidden_OE, part, layout.exchange)
        )
        loss = 0 * loss if is_idle else loss
        return MicroResult(loss, loss.detach())


def _module_state(module: nn.Module, gather: Gather) -> dict[str, Tensor]:
    """The tensors of the trained parameters; frozen ones are those of the model that the run began with."""
    return {name: gather(parameter) for name, parameter in module.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def _load_whole(module: nn.Module, state: Mapping[str, Tensor | Stored]) -> None:
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if trained.keys() != state.keys():
        odd = sorted(trained.keys() ^ state.keys())
        raise ConfigError(f"the state is of another critic: {len(odd)} tensors are of one alone, such as {odd[0]!r}")
    for name, parameter in trained.items():
        parameter.copy_(like(state[name], parameter))
