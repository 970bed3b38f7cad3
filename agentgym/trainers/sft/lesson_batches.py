"""A step on recorded text: its micro-batches, their tensors, and the threads or ranks that compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from agentgym.chat_templates.protocol import Renderer
from agentgym.errors import ConfigError
from agentgym.model.language_model import LanguageModel
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.learner.pass_tokens import fitting_tokens
from agentgym.trainers.parallel.gradient_threads import one_core
from agentgym.trainers.parallel.sharded_tensor import is_sharded
from agentgym.trainers.parallel.world import LearnerRanks, OneProcess
from agentgym.trainers.sft.demonstrations import Demonstration

__all__ = ["LessonPart", "TargetRows", "check_vocabulary", "cut_batch", "lesson_world", "most_tokens", "share_batch"]

T = TypeVar("T")

_STATE_BYTES = 16
"""The bytes of a weight's float32 copy, its gradient and AdamW's two means."""


def check_vocabulary(renderer: Renderer, model: LanguageModel) -> None:
    """Raises ConfigError if the tokenizer has ids that the model does not have."""
    if renderer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {renderer.vocab_size} ids and the model only {model.vocab_size}: use the"
            " tokenizer that belongs to the model"
        )


def most_tokens(model: LanguageModel, given: int | None, *, recomputes: bool) -> int | None:
    """Returns the most tokens of a forward pass; None is no bound, which a CPU has where none is given."""
    if given is not None or model.embed.device.type == "cpu":
        return given
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = sum((tensor.to_local() if is_sharded(tensor) else tensor).numel() for tensor in trained)
    return fitting_tokens(model, recomputes=recomputes, kept=_STATE_BYTES * own)


def cut_batch(batch: Sequence[T], size: Callable[[T], int], num_parts: int, most: int | None) -> list[Sequence[T]]:
    """Returns the micro-batches of a step: its rows in turn to `num_parts` threads, in passes of at most `most` tokens.

    A row is never cut, and has a pass of its own if it is longer.
    """
    return [part for index in range(num_parts) for part in _passes(batch[index::num_parts], size, most)]


@dataclass(frozen=True, eq=False)
class LessonPart(Generic[T]):
    """A micro-batch of one process."""

    rows: Sequence[T]
    is_idle: bool = False
    """True if another rank computes these rows, and this one keeps in step with the others."""


def share_batch(
    batch: Sequence[T], size: Callable[[T], int], world: LearnerRanks, most: int | None, *, threads: bool = False
) -> list[LessonPart[T]]:
    """Returns this process's micro-batches of a step; every rank has as many, since they gather weights for each.

    They are cut for the `threads` of a process that is alone, or as for one thread.
    """
    num_threads = world.num_threads if threads and isinstance(world, OneProcess) else 1
    own = [LessonPart(rows) for rows in cut_batch(batch[world.rank :: world.size], size, num_threads, most)]
    counts = world.gather_scalars(torch.tensor([len(own)], device=world.device))
    return own + [LessonPart(batch[:1], is_idle=True)] * (max(map(int, counts)) - len(own))


def _passes(rows: Sequence[T], size: Callable[[T], int], most: int | None) -> Iterator[Sequence[T]]:
    start, tokens = 0, 0
    for place, row in enumerate(rows):
        if most is not None and place > start and tokens + size(row) > most:
            yield rows[start:place]
            start, tokens = place, 0
        tokens += size(row)
    if start < len(rows):
        yield rows[start:]


@dataclass(frozen=True, eq=False)
class TargetRows:
    """Rows laid end to end, on the CPU, where they are laid out without waiting for a GPU."""

    ids_N: Tensor
    """The input tokens."""
    mask_N: Tensor
    """True where the next token is learned."""
    target_M: Tensor
    """The learned tokens."""
    seqlens: Sequence[int]
    num_targets: Sequence[int]
    """The learned tokens of each row."""

    @classmethod
    def of(cls, rows: Sequence[Demonstration]) -> TargetRows:
        """Returns the rows' inputs, each the token before its target."""
        ids_N = torch.tensor([i for row in rows for i in row.ids[:-1]])
        target_N = torch.tensor([i for row in rows for i in row.ids[1:]])
        mask_N = torch.tensor([flag for row in rows for flag in row.mask[1:]])
        lengths, counts = [len(row.ids) - 1 for row in rows], [sum(row.mask[1:]) for row in rows]
        return cls(ids_N, mask_N, target_N[mask_N], lengths, counts)

    def layout(self, world: LearnerRanks) -> PackedLayout:
        """Returns the layout of a forward pass, whose final states are those of the targets."""
        return world.layout(self.seqlens, self.ids_N, self.mask_N)


@contextmanager
def lesson_world(ranks: LearnerRanks | None, device: torch.device, num_threads: int) -> Iterator[LearnerRanks]:
    """Opens the threads that learn: so many on a CPU, and one for a GPU, beside which the CPU needs one core.

    With `ranks`, each of them learns in one thread.
    """
    on_cpu = device.type == "cpu"
    world = ranks or OneProcess(device, num_threads if on_cpu else 1)
    try:
        if on_cpu:
            yield world
        else:
            with one_core():
                yield world
    finally:
        if ranks is None:
            world.close()
