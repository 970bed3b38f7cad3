"""The step of the fast decoder as one function, compiled for the machine (`kernels/decoder_step.cpp`).

A step of torch's operators calls a hundred of them. In a small model calling takes most of the time, and Python's lock,
which the event loop needs meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agentgym.engines.local.kernels.cpp_compiler import load_library
from agentgym.engines.local.kernels.row_products import packed_copy
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows
from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder, DecoderLayer

__all__ = ["DecoderStep"]

# Shape suffixes: N rows of the step, R rows whose logits are wanted, V vocabulary.

_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("numbers", _POINTER),
        *((name, _NUMBER) for name in ("outer", "inner", "outer_stride", "inner_stride")),
        ("packed", _POINTER),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", _POINTER),
        ("qkv", _Matrix),
        *((name, _POINTER) for name in ("qkv_bias", "q_norm", "k_norm")),
        ("out", _Matrix),
        ("ffn_norm", _POINTER),
        *((name, _Matrix) for name in ("gate_up", "down")),
        ("stored", _POINTER),
    ]


_SIZES = ("num_layers", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width", "num_slots", "window")


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _NUMBER) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("norm_eps", "scale")),
        *((name, _POINTER) for name in ("embed", "cos", "sin", "final_norm")),
        ("head", _Matrix),
        ("layers", ctypes.POINTER(_Layer)),
    ]


class _Due(ctypes.Structure):
    _fields_ = [
        *((name, _NUMBER) for name in ("num_rows", "num_wanted")),
        *((name, _POINTER) for name in ("ids", "slots", "positions", "roots", "commons", "wanted")),
    ]


@functools.cache
def _function() -> ctypes._NamedFuncPointer:
    """Compiles and loads the source; raises OSError with the reason if it cannot."""
    function = load_library(Path(__file__).parent / "kernels" / "decoder_step.cpp").decoder_step
    function.argtypes = [ctypes.POINTER(_Model), ctypes.POINTER(_Due), _POINTER, _NUMBER]
    function.restype = None
    return function


class DecoderStep:
    """Runs steps of one model over one cache, in float32 on a CPU.

    Example: `DecoderStep(model, cache).forward(rows)` returns the `[R, V]` logits that `StepRunner` would return, but
    for the last bits.
    """

    def __init__(self, model: Decoder, cache: SlotCache) -> None:
        """Raises ConfigError for another device or dtype, and OSError if the source cannot be compiled."""
        if model.embed.device.type != "cpu" or model.embed.dtype != torch.float32:
            where = f"{model.embed.dtype} on {model.embed.device}"
            raise ConfigError(f"the compiled step computes in float32 on a cpu, and the model is {where}")
        self.model, self.cache = model, cache
        self._function = _function()
        self._tensors = [*model.parameters(), model.cos_TD, model.sin_TD, *cache.kv]
        self._matrices = [model.head_weight]
        for layer in model.layers:
            assert isinstance(layer, DecoderLayer)
            self._matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
        self._pointers: object = None
        self._description = _Model()

    def forward(self, rows: Rows) -> Tensor:
        """Computes logits `[R, V]` of the wanted rows; writes keys and values into the cache."""
        root_N, common_N = self.cache.common.of(rows.slot_N, rows.num_decode)
        ids_N = self.cache.tokens_SW[rows.slot_N, rows.position_N]
        inputs = [_contiguous(x) for x in (ids_N, rows.slot_N, rows.position_N, root_N, common_N, rows.output_R)]
        due = _Due(len(rows.slot_N), len(rows.output_R), *(x.ctypes.data for x in inputs))
        logits_RV = torch.empty(len(rows.output_R), self.model.head_weight.shape[0])
        self._function(self._describe(), due, logits_RV.data_ptr(), torch.get_num_threads())
        return logits_RV

    def _describe(self) -> _Model:
        """Returns where everything lies now: memory may have been given back, or copies be older than weights."""
        pointers = [*map(Tensor.data_ptr, self._tensors), *map(packed_copy, self._matrices)]
        if pointers == self._pointers:
            return self._description
        model, c = self.model, self.model.config
        layers = (_Layer * c.num_layers)(*map(_layer, model.layers, self.cache.kv))
        described = _Model(
            c.num_layers, c.width, c.num_heads, c.num_kv_heads, c.head_width, c.ffn_width,
            *self.cache.kv[0].shape[1:4:2], c.norm_eps, c.head_width**-0.5,
            *map(_address, (model.embed, model.cos_TD, model.sin_TD, model.final_norm)),
            _matrix(model.head_weight), layers,
        )  # fmt: skip
        self._description, self._pointers = described, pointers
        return described


def _layer(layer: nn.Module, stored: Tensor) -> _Layer:
    assert isinstance(layer, DecoderLayer)
    return _Layer(
        _address(layer.input_norm), _matrix(layer.qkv), *map(_address, (layer.qkv_bias, layer.q_norm, layer.k_norm)),
        _matrix(layer.out), _address(layer.ffn_norm), _matrix(layer.gate_up), _matrix(layer.down), _address(stored),
    )  # fmt: skip


def _matrix(weight: Tensor) -> _Matrix:
    return _Matrix(weight.data_ptr(), *weight.shape, *weight.stride(), packed_copy(weight))


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the step reads neighbours"
    return tensor.data_ptr()


def _contiguous(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(values, np.int64)
