"""Attention of tokens to the keys of their own slots on a CPU, compiled for the machine (`slot_attention.cpp`).

A token's bits depend on its query, and on the keys and values that it sees, alone: not on the other tokens of the step,
nor on whether it was read in a prompt or sampled.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from agentgym.engines.local.kernels.cpp_compiler import cpp_compiler, load_library

__all__ = ["SlotRows", "attend_slots", "attends_compiled", "load_attention"]

_log = logging.getLogger(__name__)

# Shape suffixes: N tokens, H query heads, K key/value heads, D width of a key or a value, S slots, W window.


class _Sizes(ctypes.Structure):
    """The struct `Sizes` of the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads", "key_width", "value_width")),
        *((name, ctypes.c_int64) for name in ("num_slots", "window", "stored_width")),
        ("softcap", ctypes.c_float),
    ]


def attends_compiled(like: Tensor) -> bool:
    """Returns whether a kernel attends tensors of this dtype on this device; compiles it the first time.

    On a CPU that is `attend_slots`, for float32 and bfloat16, which needs a C++ compiler; if that fails, a warning
    gives the reason. On a GPU it is `attend_tiles` (`gpu_attention`), which needs Triton.
    """
    if like.device.type == "cuda":
        return find_spec("triton") is not None
    if like.device.type != "cpu" or like.dtype not in _FUNCTIONS or cpp_compiler() is None:
        return False
    try:
        load_attention()
    except OSError as error:  # a compiler is not needed to continue
        _log.warning("%s; attention is computed by torch, slower", error)
        return False
    return True


_FUNCTIONS = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}


@functools.cache
def load_attention() -> ctypes.CDLL:
    """Compiles and loads the source; raises OSError with the reason if it cannot."""
    library = load_library(Path(__file__).with_suffix(".cpp"))
    for name in _FUNCTIONS.values():
        getattr(library, name).argtypes = [ctypes.POINTER(_Sizes), *[ctypes.c_void_p] * 11, ctypes.c_int64]
        getattr(library, name).restype = None
    return library


class SlotRows(NamedTuple):
    """The slots and positions of tokens, and the first key that each sees (by default that of position 0).

    The first `common_N` keys and values of a token's slot are equal to those of `root_N`, and are read there, once for
    many tokens. By default all are read in its own slot.
    """

    slot_N: Tensor
    position_N: Tensor
    first_N: Tensor | None = None
    root_N: Tensor | None = None
    common_N: Tensor | None = None


def attend_slots(
    qkv: Sequence[Tensor], stored: Tensor, rows: SlotRows, sinks_H: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """Stores keys and values of the tokens, and returns the attention outputs `[N, H, D]` of their scaled queries.

    `qkv` are queries `[N, H, D]`, keys and values `[N, K, D]`. `stored` is a layer's `[2, S, K, W, D]`, whose first
    columns are taken where keys or values are narrower. A token sees the keys of its slot up to its own position.
    Tokens of one slot should be neighbours. `sinks_H` are the logits of attending to nothing.
    """
    q_NHD, k_NKD, v_NKD = (x.contiguous() for x in qkv)
    sinks_H = None if sinks_H is None else sinks_H.to(stored.dtype).contiguous()
    out_NHD = q_NHD.new_empty(*q_NHD.shape[:2], v_NKD.shape[2])
    heads = (*q_NHD.shape[:2], *k_NKD.shape[1:], v_NKD.shape[2])
    sizes = _Sizes(*heads, stored.shape[1], *stored.shape[3:], softcap or 0.0)
    tensors = q_NHD, k_NKD, v_NKD, stored, *rows, sinks_H, out_NHD
    function = getattr(load_attention(), _FUNCTIONS[stored.dtype])
    function(sizes, *(None if x is None else x.data_ptr() for x in tensors), torch.get_num_threads())
    return out_NHD
