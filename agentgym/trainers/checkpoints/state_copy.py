"""Copies a tree of tensors and numbers to the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["copy_to_cpu"]


def copy_to_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same tree with a copy of every tensor, on the CPU."""
    return {key: _copy_value(value) for key, value in state.items()}


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return copy_to_cpu(value)
    return [_copy_value(item) for item in value] if isinstance(value, list | tuple) else value
