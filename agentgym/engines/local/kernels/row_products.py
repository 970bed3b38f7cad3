"""Products of rows with weights for the in-process engine: the bits of a row do not depend on the other rows.

On a CPU they are compiled for the machine (`row_products.cpp`), in float32 and bfloat16, and oneDNN's without a C++
compiler.

The compiled product reads a weight in an order of its own, which takes half of the time of a step with few rows. An
engine may have copies in that order kept (`keep_packed`), which are made again when the weight changes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from agentgym.engines.local.kernels.cpp_compiler import cpp_compiler, load_library
from agentgym.engines.local.machine_memory import lazy_zeros
from agentgym.model.ops.cpu_products import has_bfloat16_products

__all__ = ["MIN_ROWS", "forget_packed", "keep_packed", "packed_copy", "padded_rows", "row_product"]

_log = logging.getLogger(__name__)

# Shape suffixes: N rows, I inputs, O outputs.

MIN_ROWS = 4
"""oneDNN's products of fewer rows use other code paths with other bits, so a step is padded to this many rows."""
_BY_NAME = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_UNIT_BYTES, _LINE_BYTES = 4, 64


def padded_rows(num_rows: int) -> int:
    """Returns the number of rows to compute for `num_rows`: at least MIN_ROWS, and few distinct numbers.

    oneDNN compiles a kernel for each number of rows and keeps a thousand of them, which would be half a gigabyte.
    """
    if num_rows <= 32:
        return max(MIN_ROWS, -(-num_rows // 4) * 4)
    return -(-num_rows // 32) * 32


def row_product(x_NI: Tensor, weight_OI: Tensor, added_NO: Tensor | None = None) -> Tensor:
    """Computes `x @ weight.T`, plus `added`, `[N, O]`; `N` is at least `MIN_ROWS`."""
    kernel = _kernel_for(x_NI)
    if not _fits(x_NI, weight_OI, added_NO):
        product_NO = x_NI.mm(weight_OI.t())  # torch names what is wrong
        return product_NO if added_NO is None else product_NO + added_NO
    if kernel is None or x_NI.shape[1] * x_NI.element_size() % _UNIT_BYTES:
        return _product_without_kernel(x_NI, weight_OI, added_NO)
    x_NI = x_NI.contiguous()
    out_NO = x_NI.new_empty(x_NI.shape[0], weight_OI.shape[0])
    added = None if added_NO is None else added_NO.contiguous()
    kernel.multiply(
        *_weight_arguments(weight_OI),
        packed_copy(weight_OI),
        x_NI.data_ptr(),
        len(x_NI),
        None if added is None else added.data_ptr(),
        out_NO.data_ptr(),
        torch.get_num_threads(),
    )
    return out_NO


def _fits(x_NI: Tensor, weight_OI: Tensor, added_NO: Tensor | None) -> bool:
    """Returns whether a kernel may read the tensors."""
    fits = x_NI.dtype == weight_OI.dtype and x_NI.device == weight_OI.device and x_NI.shape[1] == weight_OI.shape[1]
    if added_NO is None:
        return fits
    return fits and added_NO.dtype == x_NI.dtype and added_NO.shape == (len(x_NI), len(weight_OI))


def _weight_arguments(weight_OI: Tensor) -> tuple[int, int, int, int, int]:
    (num_outputs, num_inputs), (output_stride, input_stride) = weight_OI.shape, weight_OI.stride()
    return weight_OI.data_ptr(), num_outputs, num_inputs, output_stride, input_stride


def _product_without_kernel(x_NI: Tensor, weight_OI: Tensor, added_NO: Tensor | None) -> Tensor:
    if not _onednn_computes(x_NI):
        product_NO = x_NI.mm(weight_OI.t())
        return product_NO if added_NO is None else added_NO + product_NO
    total: Tensor
    if added_NO is None:
        total = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, None, "none", [], "")
    else:
        total = torch.ops.mkldnn._linear_pointwise.binary(x_NI, added_NO, weight_OI, None, "add")
    return total


def _onednn_computes(like: Tensor) -> bool:
    if like.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return like.dtype == torch.float32 or (like.dtype == torch.bfloat16 and has_bfloat16_products())


class _Kernel(NamedTuple):
    """The functions of the library for one dtype, and the number of outputs that it computes together."""

    multiply: ctypes._NamedFuncPointer
    pack: ctypes._NamedFuncPointer
    width: int


def _kernel_for(like: Tensor) -> _Kernel | None:
    if like.device.type != "cpu" or like.dtype not in _BY_NAME:
        return None
    return _kernel(like.dtype, os.environ.get("CXX"))


@functools.cache
def _kernel(dtype: torch.dtype, cxx: str | None) -> _Kernel | None:
    """Compiles and loads the source; returns None if it cannot."""
    if cpp_compiler() is None:
        return None
    try:
        library = load_library(Path(__file__).with_suffix(".cpp"))
    except OSError as error:  # a compiler is not needed to continue
        _log.warning("%s; products are computed by oneDNN, slower", error)
        return None
    multiply, pack = (getattr(library, f"{name}_{_BY_NAME[dtype]}") for name in ("multiply", "pack"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    described = [pointer, *[number] * 4]
    multiply.argtypes = [*described, pointer, pointer, number, pointer, pointer, number]
    pack.argtypes = [*described, pointer]
    multiply.restype = pack.restype = None
    return _Kernel(multiply, pack, library.panel_width())


@dataclass(eq=False, slots=True)
class _Packed:
    """The copy of a weight in the kernel's order."""

    numbers: Tensor
    pages: mmap.mmap
    """The memory of this copy and of those that are kept with it."""
    version: int = -1
    """The version of the weight that was copied; -1 if it has to be copied again."""


_packed_by_weight = WeakIdKeyDictionary()


def keep_packed(weights: Iterable[Tensor]) -> None:
    """Has `row_product` keep copies of those weights that the kernel multiplies, which take as much memory again.

    They are neighbours in large pages of memory, which are read faster.
    """
    spans: list[tuple[Tensor, int, int]] = []
    end = 0
    for weight in weights:
        kernel = _kernel_for(weight)
        if kernel and weight.ndim == 2 and not weight.is_inference() and weight not in _packed_by_weight:
            num_numbers = -(-weight.shape[0] // kernel.width) * kernel.width * weight.shape[1]
            spans.append((weight, end, num_numbers))
            end += -(-num_numbers * weight.element_size() // _LINE_BYTES) * _LINE_BYTES
    if end:
        pages = lazy_zeros(end)
        for weight, start, num_numbers in spans:
            numbers = torch.frombuffer(pages, dtype=weight.dtype, offset=start, count=num_numbers)
            _packed_by_weight[weight] = _Packed(numbers, pages)


def forget_packed(weights: Iterable[Tensor], *, free: bool = False) -> None:
    """Has the copies of weights made again when they are needed, and with `free` gives up their memory until then.

    Without it, they are made again after each change in place that autograd counts.
    """
    for weight in weights:
        copy: _Packed | None = _packed_by_weight.get(weight)
        if copy is not None:
            copy.version = -1
            if free:
                copy.pages.madvise(mmap.MADV_DONTNEED)  # of all at once, which may be repeated


def packed_copy(weight_OI: Tensor) -> int | None:
    """Returns the address of the copy of a weight that is current; None for weights that are given without one."""
    copy: _Packed | None = _packed_by_weight.get(weight_OI)
    if copy is None:
        return None
    if copy.version != weight_OI._version:
        kernel = _kernel_for(weight_OI)
        assert kernel is not None, "it made the copies"
        kernel.pack(*_weight_arguments(weight_OI), copy.numbers.data_ptr())
        copy.version = weight_OI._version
    return copy.numbers.data_ptr()
