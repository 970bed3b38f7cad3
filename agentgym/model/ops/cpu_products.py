"""Which products a processor computes well."""

from __future__ import annotations

import logging
from functools import cache

import torch

__all__ = ["has_bfloat16_products", "warn_of_slow_bfloat16"]

logger = logging.getLogger(__name__)


@cache
def has_bfloat16_products() -> bool:
    """True if oneDNN computes products of bfloat16 matrices on this processor.

    Without (AVX2, for one), torch computes them number by number: forty times as slowly as in float32.
    """
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def warn_of_slow_bfloat16() -> None:
    """Says once, on a processor without products of bfloat16, what bfloat16 costs there."""
    if not has_bfloat16_products():
        logger.warning("bfloat16 takes many times as long as float32 on this processor, which has no products in it")
