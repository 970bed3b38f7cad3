"""The in-process engine's step of a model of transformers as one graph of `torch.compile`, and the choice of steps.

In a small model a step is mostly the cost of calling a hundred operators. Compiled, everything between two matrix
products is one loop over the rows, and attention is one operator (`slot_attention`), so a token's bits depend only on
the tokens before it and on the weights. They differ in the last place from those of the uncompiled step: an engine uses
one or the other for its whole life.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentgym.engines.local.decoder_step import DecoderStep
from agentgym.engines.local.kernels.row_products import MIN_ROWS
from agentgym.engines.local.kernels.slot_attention import attends_compiled, load_attention
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows, pad_rows
from agentgym.engines.local.step import StepRunner
from agentgym.engines.local.transformers_graph import StepInputs, has_static_step, step_graph
from agentgym.engines.local.transformers_step import TransformersStep
from agentgym.errors import ConfigError, describe_error
from agentgym.model.decoder import Decoder
from agentgym.model.transformers_model import TransformersModel

if TYPE_CHECKING:
    from agentgym.engines.local.graphed_step import GraphedStep

__all__ = ["CompiledStep", "Runner", "make_step", "make_steps"]

_log = logging.getLogger(__name__)

# Shape suffixes: R rows whose logits are wanted, V vocabulary.

_MOST_ENGINES = 256  # engines that compile in one process; the default of 8 is meant for functions that should not vary

_MAX_DIFFERENCE = 1e-3  # nats between the logprobs of a traced step and of the model itself

# Indices are the engine's own, so the loops do not check them.
_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "assert_indirect_indexing": False,
    "size_asserts": False,
}


Runner: TypeAlias = "StepRunner | DecoderStep | GraphedStep | CompiledStep | TransformersStep"
"""The parts of an engine that compute its steps."""


class CompiledStep:
    """Runs steps of one model over one cache, on CPU; compiles at its first run (seconds, cached on disk by torch).

    Example: `CompiledStep(model, cache).forward(rows)` returns the `[R, V]` logits that `StepRunner` would return.
    """

    def __init__(self, model: TransformersModel, cache: SlotCache) -> None:
        if model.embed.device.type != "cpu":
            raise ConfigError(f"the compiled step runs on cpu, and the model is on {model.embed.device}")
        if model.embed.dtype != torch.float32:
            raise ConfigError(f"the compiled step computes in float32, and the model is {model.embed.dtype}")
        if not has_static_step(model):
            raise ConfigError("the step of a mixture of experts, or of a model that keeps a state, is not compiled")
        try:
            load_attention()
        except OSError as error:
            raise ConfigError(str(error)) from error
        self.model, self.cache = model, cache
        self._step: Callable[[StepInputs, tuple[Tensor, ...]], Tensor] | None = None

    def with_cache(self, cache: SlotCache) -> CompiledStep:
        """Returns the same compiled step over another cache of the same shape."""
        step = copy(self)
        step.cache = cache
        return step

    def forward(self, rows: Rows) -> Tensor:
        """Computes logits `[R, V]` of the wanted rows; writes keys and values into the cache."""
        cache, scratch = self.cache, self.cache.num_slots
        root_N, common_N = cache.common.of(rows.slot_N, rows.num_decode)
        due = StepInputs(
            torch.from_numpy(pad_rows(cache.tokens_SW[rows.slot_N, rows.position_N])),
            torch.from_numpy(pad_rows(rows.slot_N, scratch)),
            torch.from_numpy(pad_rows(rows.position_N)),
            torch.from_numpy(pad_rows(root_N, scratch)),
            torch.from_numpy(pad_rows(common_N)),
            torch.from_numpy(pad_rows(rows.wanted_R)),
        )
        if self._step is None:
            self.compile()
        assert self._step is not None
        return self._step(due, cache.kv)[: len(rows.wanted_R)]

    @torch.inference_mode()
    def compile(self) -> None:
        """Compiles now; raises whatever `torch.compile` raises if it cannot (a missing header, a read-only disk)."""
        graph = step_graph(self.model, self.cache)
        compiled = torch.compile(graph.step, fullgraph=True, options=_OPTIONS)
        # Compiled at sizes that differ, so that the compiler does not take two of them for the same.
        due = self._inputs(2 * MIN_ROWS, MIN_ROWS)
        for tensor in due:
            torch._dynamo.mark_dynamic(tensor, 0)
        for kv in self.cache.kv:
            torch._dynamo.mark_dynamic(kv, 1)
        # What differs between the engines of a process, such as the model, must not be taken for variable.
        with torch._dynamo.config.patch(cache_size_limit=_MOST_ENGINES, automatic_dynamic_shapes=False):
            compiled(due, self.cache.kv, graph.weights)
        self._step = lambda due, kv: compiled(due, kv, graph.weights)
        self._compare()

    def _compare(self) -> None:
        """Raises ConfigError if the traced step gives other logits than the model's own, of a few tokens of a slot."""
        length = min(2 * MIN_ROWS, self.cache.window)
        row_N = np.arange(length)
        before_N = self.cache.tokens_SW[0, :length].copy()
        self.cache.tokens_SW[0, :length] = 7919 * (row_N + 1) % self.model.vocab_size
        rows = Rows(np.zeros_like(row_N), row_N, 0, ((0, 0, length),), row_N)
        compiled_RV, own_RV = (
            step.forward(rows).log_softmax(-1) for step in (self, TransformersStep(self.model, self.cache))
        )
        self.cache.tokens_SW[0, :length] = before_N
        difference = float((compiled_RV - own_RV).abs().max())
        for kv in self.cache.kv:
            kv[:, 0, :, :length] = 0
        if not difference <= _MAX_DIFFERENCE:
            raise ConfigError(f"the compiled step differs by {difference:.2g} nats from the model's own")

    def _inputs(self, num_rows: int, num_wanted: int) -> StepInputs:
        """Returns rows of the scratch slot."""
        slot_N = torch.full((num_rows,), self.cache.num_slots)
        zeros_N, zeros_R = torch.zeros_like(slot_N), torch.zeros(num_wanted, dtype=torch.int64)
        return StepInputs(zeros_N, slot_N, zeros_N.clone(), slot_N.clone(), zeros_N.clone(), zeros_R)


def make_step(model: Decoder | TransformersModel, cache: SlotCache, *, compiles: bool, required: bool) -> Runner:
    """Returns the compiled step of a model if it `compiles`; if that fails and is not `required`, warns instead.

    On a GPU the steps of the fast decoder run as CUDA graphs, if Triton is there.
    """
    if isinstance(model, Decoder) and model.embed.is_cuda and attends_compiled(model.embed):
        from agentgym.engines.local.graphed_step import GraphedStep  # needs Triton

        return GraphedStep(model, cache)
    try:
        if compiles and isinstance(model, Decoder):
            return DecoderStep(model, cache)
        if compiles:
            assert isinstance(model, TransformersModel)
            step = CompiledStep(model, cache)
            step.compile()
            return step
    except Exception as error:  # a compiler may fail in any way, and is not needed to continue
        if required:
            raise
        reason = " ".join(str(error).partition("Set TORCHDYNAMO")[0].split())[:300] or describe_error(error)
        _log.warning("the engine's step could not be compiled and runs uncompiled, slower: %s", reason)
    return StepRunner(model, cache) if isinstance(model, Decoder) else TransformersStep(model, cache)


def make_steps(
    model: Decoder | TransformersModel, caches: Sequence[SlotCache], *, compiles: bool, required: bool
) -> list[Runner]:
    """Returns a step for each of several caches of the same shape; see `make_step`."""
    step = make_step(model, caches[0], compiles=compiles, required=required)
    if isinstance(step, CompiledStep):
        return [step, *map(step.with_cache, caches[1:])]
    own: Any = type(step)
    return [step, *(own(model, cache) for cache in caches[1:])]
