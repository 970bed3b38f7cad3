"""The step of the fast decoder on a GPU: nine kernels a layer, recorded as CUDA graphs.

A step of few rows is mostly the cost of launching kernels. So a graph is recorded for some numbers of rows, when they
first occur, without and with prompts among them; steps are padded to these. Larger steps run without a graph. A row's
last bits may depend on the other rows: cuBLAS takes other kernels for other numbers of rows.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.local.kernels.gpu_attention import attend_stored
from agentgym.engines.local.kernels.gpu_rows import rotate_and_store
from agentgym.engines.local.kernels.gpu_tiles import GpuTiles, cut_prompts, max_tiles
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows
from agentgym.errors import describe_error
from agentgym.model.decoder import Decoder, DecoderLayer
from agentgym.model.ops.gpu_rows import gate

__all__ = ["GraphedStep"]

_log = logging.getLogger(__name__)

# Shape suffixes: N rows of the step, C tiles (as many as rows), R rows whose logits are wanted, E model width, V
# vocabulary.

_MAX_ROWS = 2048  # of a graph: in larger steps launches take less time than the kernels
_SPLIT_KEYS = 256  # the fewest keys for which another program pays


class GraphedStep:
    """Runs steps of one model over one cache, both on a GPU."""

    def __init__(self, model: Decoder, cache: SlotCache) -> None:
        self.model, self.cache = model, cache
        self._group = model.config.num_heads // model.config.num_kv_heads
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._records = True
        properties = torch.cuda.get_device_properties(model.embed.device)
        self._num_processors = properties.multi_processor_count

    def forward(self, rows: Rows) -> Tensor:
        """Computes logits `[R, V]` of the wanted rows; writes keys and values into the cache."""
        inputs = self._inputs(rows)
        num_rows, has_prompts = inputs.shape[1], bool(rows.extends)
        key = num_rows, has_prompts
        if num_rows > _MAX_ROWS or not self._records or not (key in self._graphs or self._record(key)):
            device = self.model.embed.device
            states_NE = self.states(torch.from_numpy(inputs).to(device), has_prompts)
        else:
            states_NE = self._graphs[key].run(inputs)
        if len(rows.output_R) < len(rows.slot_N):
            states_NE = states_NE[torch.from_numpy(rows.output_R).to(states_NE.device)]
        else:
            states_NE = states_NE[: len(rows.output_R)]
        return F.linear(states_NE, self.model.head_weight)

    def forget(self) -> None:
        """Forgets all graphs, which hold addresses of weights and cache."""
        self._graphs.clear()

    def states(self, inputs: Tensor, has_prompts: bool) -> Tensor:
        """Computes final states `[N, E]` of rows as `_inputs` describes them, on the GPU."""
        model, config = self.model, self.model.config
        ids_N, slot_N, position_N, first_C, count_C, decoded_N = inputs
        num_rows = len(ids_N)
        tiles = GpuTiles(slot_N, position_N, num_rows, num_splits=self._num_splits(num_rows))
        if has_prompts:  # as many programs as any step of this size needs: one without a token takes time too
            num_slots = self.cache.num_slots
            few = slice(max_tiles(num_rows, num_slots, self._group))
            prompts = {"first_C": first_C[few], "count_C": count_C[few], "decoded": decoded_N[:1]}
            tiles = replace(tiles, num_decode=min(num_rows, num_slots), **prompts)
        x_NE = F.embedding(ids_N, model.embed)
        for layer, kv in zip(model.layers, self.cache.kv, strict=True):
            assert isinstance(layer, DecoderLayer)
            flat_NO = F.linear(_norm(x_NE, layer.input_norm, config.norm_eps), layer.qkv, layer.qkv_bias)
            norms, tables = (layer.q_norm, layer.k_norm), (model.cos_TD, model.sin_TD)
            q_NHD = rotate_and_store(flat_NO, kv, (slot_N, position_N), tables, norms, config.norm_eps)
            attended_NHD = torch.empty_like(q_NHD)
            attend_stored(q_NHD, kv, tiles, attended_NHD)
            x_NE.addmm_(attended_NHD.flatten(1), layer.out.t())
            inner_NF = gate(F.linear(_norm(x_NE, layer.ffn_norm, config.norm_eps), layer.gate_up))
            x_NE.addmm_(inner_NF, layer.down.t())
        return _norm(x_NE, model.final_norm, config.norm_eps)

    def _inputs(self, rows: Rows) -> NDArray[np.int64]:
        """Returns ids, slots, positions, tiles of prompts, and the number of decoded rows, `[6, N]`.

        Padding rows are decoded in the scratch slot if there are no prompts; otherwise they are in no tile.
        """
        cache, size = self.cache, len(rows.slot_N)
        inputs = np.zeros((6, _num_padded(size)), np.int64)
        inputs[0, :size] = cache.tokens_SW[rows.slot_N, rows.position_N]
        inputs[1, :size], inputs[1, size:] = rows.slot_N, cache.num_slots
        inputs[2, :size] = rows.position_N
        tiles = cut_prompts(rows.num_decode, [extend[2] for extend in rows.extends], self._group)
        inputs[3:5, : tiles.shape[1]] = tiles
        inputs[5] = rows.num_decode
        return inputs

    def _num_splits(self, num_rows: int) -> int:
        """Returns the parts that the keys of each decoded row are split into: as many as keep the GPU busy."""
        programs = num_rows * self.model.config.num_kv_heads
        return max(1, min(2 * self._num_processors // programs, self.cache.window // _SPLIT_KEYS, 16))

    def _record(self, key: tuple[int, bool]) -> bool:
        try:
            self._graphs[key] = _Graph(self, *key, next((graph.pool for graph in self._graphs.values()), None))
        except RuntimeError as error:  # an operator that cannot be recorded: a graph is not needed to continue
            _log.warning("steps run without CUDA graphs, slower: %s", describe_error(error))
            self._records = False
        return self._records


class _Graph:
    """The recorded steps of a number of rows."""

    def __init__(self, step: GraphedStep, num_rows: int, has_prompts: bool, pool: Any) -> None:
        device = step.model.embed.device
        self._inputs = torch.zeros(6, num_rows, dtype=torch.int64, device=device)
        self._inputs[1] = step.cache.num_slots
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            step.states(self._inputs, has_prompts)  # compiles kernels and makes workspaces, which cannot be recorded
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile: a learner, say.
        with torch.cuda.graph(self._graph, pool, capture_error_mode="thread_local"):
            self._states_NE = step.states(self._inputs, has_prompts)

    @property
    def pool(self) -> Any:
        """The memory that graphs share: one runs at a time, and its states are read before the next."""
        return self._graph.pool()

    def run(self, inputs: NDArray[np.int64]) -> Tensor:
        """Computes the states `[N, E]` of these rows; the next run changes them."""
        self._inputs.copy_(torch.from_numpy(inputs))
        self._graph.replay()
        return self._states_NE


def _num_padded(num_rows: int) -> int:
    """Returns the number of rows of a graph: few numbers, no more than a quarter above."""
    if num_rows <= 4:
        return num_rows
    step = max(4, 1 << (num_rows - 1).bit_length() >> 3)
    return -(-num_rows // step) * step


def _norm(x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(x_NE, weight_E.shape, weight_E, eps)
