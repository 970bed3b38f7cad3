"""The processes that compute a step: the interface of a learner to its one process, or to all of its ranks.

Every rank has the whole batch and takes its share of the rows. Losses are sums under weights of the whole step, so the
gradients and reports of all shares add up to the step's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from agentgym.errors import ConfigError
from agentgym.model.language_model import LanguageModel
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.parallel.balance import divide_batch
from agentgym.trainers.parallel.gradient_threads import LARGE_MODEL, GradientWorkers, MicroResult
from agentgym.trainers.parallel.sharded_tensor import is_sharded
from agentgym.trainers.settings.learner import LearnerConfig

__all__ = ["IndexRange", "LearnerRanks", "OneProcess", "Sharded", "Share", "is_large", "learner_ranks", "model_of"]

T = TypeVar("T")
S = TypeVar("S")

SPARING_TOKENS = (512, 1024)
"""The tokens of a pass of a large model on a CPU where none are set: the first that suits a batch."""
MAX_REPEATED = 1.1
"""The tokens that are computed with such a pass at most, as a multiple of those without it."""


@dataclass(frozen=True)
class IndexRange:
    """The position of a rank's numbers among those of all ranks: `[start, stop)` of `total`."""

    start: int
    stop: int
    total: int

    @property
    def here(self) -> slice:
        """The slice of all numbers that is this rank's."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, eq=False)
class Share:
    """A rank's part of a batch, in micro-batches; as many as on every rank, since all ranks run each forward pass."""

    parts: tuple[TrainingBatch, ...]
    """The rank's own micro-batches, then idle ones that keep it in step with the others; their results do not count."""
    num_own: int
    targets: IndexRange
    """The position of the rank's trained targets."""
    rows: IndexRange
    sizes: tuple[int, ...] = ()
    """The number of parts in each portion whose gradients are summed separately; empty if there is one portion."""

    def is_idle(self, number: int) -> bool:
        """True if part `number` only keeps this rank in step with the others."""
        return number >= self.num_own


class LearnerRanks(Protocol):
    """The processes of a learner; methods that take micro-batches are called by all of them, with as many."""

    rank: int
    size: int
    portion: int
    """The index of this rank's share of a batch. Ranks that share their forward passes have the same one."""
    device: torch.device
    """The device of this rank."""

    def share(self, batch: TrainingBatch, max_tokens: int) -> Share:
        """This rank's part of the batch, in micro-batches of at most `max_tokens` (see `TrainingBatch.split`)."""
        ...

    def layout(self, seqlens: Sequence[int], ids_N: Tensor, mask_N: Tensor) -> PackedLayout:
        """The layout of rows in a forward pass, each shared prefix once, with final states of the wanted entries."""
        ...

    def accumulate(
        self,
        parts: Sequence[T],
        compute: Callable[[T], MicroResult[S]],
        parameters: Sequence[Tensor],
        sizes: Sequence[int] = (),
    ) -> list[S]:
        """Adds the gradient of all ranks' losses to `parameters`; returns the reports of this rank's parts.

        `sizes` are those of the share.
        """
        ...

    def map(self, work: Callable[[T], S], parts: Sequence[T]) -> list[S]:
        """Runs `work`, which takes no gradient, on every part."""
        ...

    def whole(self, values: Sequence[Tensor], index_range: IndexRange) -> Tensor:
        """The numbers of all shares `[index_range.total]`, on every rank; `values` are this rank's, in order."""
        ...

    def gather_scalars(self, scalars_K: Tensor) -> list[Tensor]:
        """Gathers the same numbers of each share, in the order of the shares."""
        ...

    def run(self, work: Callable[[], S]) -> S:
        """Runs `work` with the threads of the step."""
        ...

    def copy(self, model: LanguageModel) -> LanguageModel:
        """Another model with the same weights, sharded over the ranks as this one is."""
        ...

    def spread(self, module: nn.Module) -> None:
        """Shards a module over the ranks, a language model block by block."""
        ...

    def close(self) -> None:
        """Stops its threads."""
        ...


@dataclass(frozen=True, eq=False)
class Sharded:
    """A model whose weights are sharded over all ranks; `Ranks.shard` makes it."""

    model: LanguageModel
    ranks: LearnerRanks


def model_of(model: LanguageModel | Sharded) -> LanguageModel:
    """Returns a model that is given whole or sharded."""
    return model.model if isinstance(model, Sharded) else model


class OneProcess(GradientWorkers):
    """A single rank without a process group, which computes micro-batches on threads; see `GradientWorkers`.

    With `portions`, a batch of `model` is split and summed as on that many ranks. With `saves_memory`, a pass has fewer
    tokens than it may have, unless prefixes that rows share would be computed again.
    """

    rank = 0
    size = 1
    portion = 0

    def __init__(
        self,
        device: torch.device,
        num_threads: int,
        *,
        portions: int = 1,
        model: LanguageModel | None = None,
        saves_memory: bool = False,
    ) -> None:
        super().__init__(num_threads, is_large=device.type == "cpu" and is_large(model))
        self.device = device
        self._portions = portions
        self._model = model
        self._saves_memory = self.is_large and saves_memory

    def share(self, batch: TrainingBatch, max_tokens: int) -> Share:
        """The whole batch."""
        portions = [batch]
        if self._portions > 1 and self._model is not None and batch.num_rows:
            ranges = divide_batch(batch, self._model, self._portions)
            portions = [batch.select(rows) for rows in ranges if len(rows)]
        if self._saves_memory:
            max_tokens = _sparing_tokens(batch, max_tokens)
        cut = [[part.to(self.device) for part in portion.split(max_tokens)] for portion in portions]
        parts = tuple(part for portion in cut for part in portion)
        sizes = tuple(map(len, cut)) if len(cut) > 1 else ()
        num_targets, num_rows = batch.num_trained_tokens, batch.num_rows
        return Share(
            parts, len(parts), IndexRange(0, num_targets, num_targets), IndexRange(0, num_rows, num_rows), sizes
        )

    def layout(self, seqlens: Sequence[int], ids_N: Tensor, mask_N: Tensor) -> PackedLayout:
        """The layout of all tokens."""
        return PackedLayout(seqlens, self.device, ids_N=ids_N, mask_N=mask_N)

    def whole(self, values: Sequence[Tensor], index_range: IndexRange) -> Tensor:
        """All values as one tensor."""
        return torch.cat(list(values)) if values else torch.zeros(index_range.total)

    def gather_scalars(self, scalars_K: Tensor) -> list[Tensor]:
        """The numbers of the only share."""
        return [scalars_K]

    def copy(self, model: LanguageModel) -> LanguageModel:
        """A deep copy, which shares the frozen parameters."""
        return copy.deepcopy(
            model, {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
        )

    def spread(self, module: nn.Module) -> None:
        """Does nothing, since there is one rank."""


def learner_ranks(model: LanguageModel | Sharded, config: LearnerConfig) -> LearnerRanks:
    """Returns the processes of a learner of the model; raises ConfigError for settings that they cannot satisfy."""
    if isinstance(model, Sharded):
        if config.critic.trunk == "shared":
            remedy = "on several ranks give it a trunk of its own (critic.trunk own)"
            raise ConfigError(f"a critic on the policy's trunk is for a learner in one process; {remedy}")
        config.check_shares(model.ranks.size)
        return model.ranks
    if is_sharded(model.embed):
        raise ConfigError("the model is sharded: give the learner what Ranks.shard gave, which knows the ranks")
    config.mesh.check_alone()
    device = model.embed.device
    num_threads = config.num_threads if device.type == "cpu" else 1
    saves_memory = config.micro_batch_tokens is None
    return OneProcess(device, num_threads, portions=config.shares or 1, model=model, saves_memory=saves_memory)


def is_large(model: LanguageModel | None) -> bool:
    """True if the micro-batches of a model are computed one after the other on a CPU, each by all threads."""
    return model is not None and model.num_parameters >= LARGE_MODEL


def _sparing_tokens(batch: TrainingBatch, max_tokens: int) -> int:
    """Returns the fewest tokens of a pass with which hardly more is computed than with `max_tokens`.

    The states of 2,048 tokens of Gemma 3 270M take 3.3 GB; those of 512 take a quarter.
    """
    most = MAX_REPEATED * batch.num_computed(max_tokens)
    fewer = (tokens for tokens in SPARING_TOKENS if tokens < max_tokens and batch.num_computed(tokens) <= most)
    return next(fewer, max_tokens)
