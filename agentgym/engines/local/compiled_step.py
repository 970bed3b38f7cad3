"""The in-process engine's step as one graph, compiled by `torch.compile`: the same function as `step`, but faster.

In a small model a step is mostly the cost of calling a hundred operators. Compiled, everything between two matrix
products is one loop over the rows. Attention is one loop too, whether a row was sampled or read, so a token's bits
depend only on the tokens before it and on the weights. They differ in the last place from those of the uncompiled step:
an engine uses one or the other for its whole life.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.local.kv_cache import L_BLOCK, SlotCache, round_up
from agentgym.engines.local.step import Rows, StepRunner, pad_rows
from agentgym.engines.local.step_graph import StepInputs
from agentgym.engines.local.transformers_graph import has_static_step, step_graph
from agentgym.engines.local.transformers_step import TransformersStep
from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.model.linear import MIN_ROWS
from agentgym.model.transformers_model import TransformersModel

__all__ = ["CompiledStep", "Runner", "make_step"]

_log = logging.getLogger(__name__)

# Shape suffixes: N rows, R rows whose logits are wanted, L padded keys, V vocabulary.

# The costs of a step, as ratios: another call is worth it if it saves this many (row, key) pairs of attention.
_CALL_COST = 4096
_MOST_ENGINES = 256  # engines that compile in one process; the default of 8 is meant for functions that should not vary

_MAX_DIFFERENCE = 1e-3  # nats between the logprobs of a traced step and of the model itself

# Indices are the engine's own, so the loops do not check them.
_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "assert_indirect_indexing": False,
    "size_asserts": False,
}


Runner: TypeAlias = "StepRunner | CompiledStep | TransformersStep"
"""The parts of an engine that compute its steps."""


class CompiledStep:
    """Runs steps of one model over one cache, on CPU; compiles at its first run (seconds, cached on disk by torch).

    Example: `CompiledStep(model, cache).forward(rows)` returns the `[R, V]` logits that `StepRunner` would return.
    """

    def __init__(self, model: Decoder | TransformersModel, cache: SlotCache) -> None:
        if model.embed.device.type != "cpu":
            raise ConfigError(f"the compiled step runs on cpu, and the model is on {model.embed.device}")
        if model.embed.dtype != torch.float32:
            raise ConfigError(f"the compiled step computes in float32, and the model is {model.embed.dtype}")
        if not has_static_step(model):
            raise ConfigError("the step of a mixture of experts, or of a model that keeps a state, is not compiled")
        self.model, self.cache = model, cache
        self._key_L = torch.arange(cache.kv[0].shape[3])
        self._step: Callable[[StepInputs], Tensor] | None = None

    def forward(self, rows: Rows) -> Tensor:
        """Computes logits `[R, V]` of the wanted rows; writes keys and values into the cache."""
        parts = _parts(rows.position_N)
        if len(parts) == 1:
            return self._run(rows.slot_N, rows.position_N, rows.wanted_R)
        row_of_N = np.full(len(rows.slot_N), -1)
        row_of_N[rows.wanted_R] = np.arange(len(rows.wanted_R))
        logits_RV = self.model.embed.new_empty(len(rows.wanted_R), self.model.vocab_size)
        for part in parts:
            wanted = np.flatnonzero(row_of_N[part] >= 0)
            part_RV = self._run(rows.slot_N[part], rows.position_N[part], wanted)
            logits_RV[torch.from_numpy(row_of_N[part][wanted])] = part_RV
        return logits_RV

    def _run(self, slot_N: NDArray[np.int64], position_N: NDArray[np.int64], wanted_R: NDArray[np.int64]) -> Tensor:
        num_keys = round_up(int(position_N.max()) + 1, L_BLOCK)
        due = StepInputs(
            torch.from_numpy(pad_rows(self.cache.tokens_SW[slot_N, position_N])),
            torch.from_numpy(pad_rows(slot_N, self.cache.num_slots)),
            torch.from_numpy(pad_rows(position_N)),
            torch.from_numpy(pad_rows(wanted_R)),
            self._key_L[:num_keys],
        )
        if self._step is None:
            self.compile()
        assert self._step is not None
        return self._step(due)[: len(wanted_R)]

    @torch.inference_mode()
    def compile(self) -> None:
        """Compiles now; raises whatever `torch.compile` raises if it cannot (a missing header, a read-only disk)."""
        graph = step_graph(self.model, self.cache)
        compiled = torch.compile(graph.step, fullgraph=True, options=_OPTIONS)
        # Compiled at sizes that differ, so that the compiler does not take two of them for the same.
        due = self._inputs(2 * MIN_ROWS, MIN_ROWS, min(2 * L_BLOCK, len(self._key_L) - L_BLOCK))  # a part of all keys
        for tensor in due:
            torch._dynamo.mark_dynamic(tensor, 0)
        for kv in self.cache.kv:
            torch._dynamo.mark_dynamic(kv, 1)
        # What differs between the engines of a process, such as the model, must not be taken for variable.
        with torch._dynamo.config.patch(cache_size_limit=_MOST_ENGINES, automatic_dynamic_shapes=False):
            compiled(due, self.cache.kv, graph.weights)
        self._step = lambda due: compiled(due, self.cache.kv, graph.weights)
        if isinstance(self.model, TransformersModel):
            self._compare(self.model)

    def _compare(self, model: TransformersModel) -> None:
        """Raises ConfigError if the traced step gives other logits than the model's own, of a few tokens of a slot."""
        length = min(2 * MIN_ROWS, self.cache.window)
        row_N = np.arange(length)
        before_N = self.cache.tokens_SW[0, :length].copy()
        self.cache.tokens_SW[0, :length] = 7919 * (row_N + 1) % model.vocab_size
        rows = Rows(np.zeros_like(row_N), row_N, 0, ((0, 0, length),), row_N)
        compiled_RV, own_RV = (
            step.forward(rows).log_softmax(-1) for step in (self, TransformersStep(model, self.cache))
        )
        self.cache.tokens_SW[0, :length] = before_N
        difference = float((compiled_RV - own_RV).abs().max())
        for kv in self.cache.kv:
            kv[:, 0, :, :length] = 0
        if not difference <= _MAX_DIFFERENCE:
            raise ConfigError(f"the compiled step differs by {difference:.2g} nats from the model's own")

    def _inputs(self, num_rows: int, num_wanted: int, num_keys: int) -> StepInputs:
        """Returns rows of the scratch slot."""
        slot_N = torch.full((num_rows,), self.cache.num_slots)
        zeros_N, zeros_R = torch.zeros_like(slot_N), torch.zeros(num_wanted, dtype=torch.int64)
        return StepInputs(zeros_N, slot_N, zeros_N.clone(), zeros_R, self._key_L[:num_keys])


def make_step(model: Decoder | TransformersModel, cache: SlotCache, *, compiles: bool, required: bool) -> Runner:
    """Returns the compiled step of a model if it `compiles`; if that fails and is not `required`, warns instead."""
    try:
        if compiles:
            step = CompiledStep(model, cache)
            step.compile()
            return step
    except Exception as error:  # a compiler may fail in any way, and is not needed to continue
        if required:
            raise
        reason = " ".join(str(error).partition("Set TORCHDYNAMO")[0].split())[:300]
        _log.warning("the engine's step could not be compiled and runs uncompiled, slower: %s", reason)
    return StepRunner(model, cache) if isinstance(model, Decoder) else TransformersStep(model, cache)


def _parts(position_N: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Splits a step's rows into calls of similar positions, ascending, if it pays: rows cost as much as the longest."""
    order_N = np.argsort(position_N, kind="stable")
    length_N = position_N[order_N] // L_BLOCK * L_BLOCK
    parts: list[NDArray[np.int64]] = []
    end = len(order_N)
    while True:
        spared_N = np.arange(end) * (length_N[end - 1] - np.roll(length_N[:end], 1))
        cut = int(spared_N[1:].argmax()) + 1 if end > 1 else 0
        if not cut or spared_N[cut] < _CALL_COST:
            return [order_N[:end], *parts]
        parts.insert(0, order_N[cut:end])
        end = cut
