"""A device without hardware: its tensors hold CPU tensors, and refuse what a GPU refuses.

A tensor of it meets no tensor of the CPU in an operator (single numbers may), and gives no numpy array. What it
computes is what the CPU computes: code that runs on it is the code that would run on a GPU, with numbers to compare.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
WAITS: list[str] = []
"""The operators that read numbers of the device, each of which would wait for a GPU; copies to it are not counted."""


_WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")


def _has_mask(args: Any) -> bool:
    """Returns whether an index is a mask, whose true entries are counted first."""
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in args[1])


class PretendTensor(torch.Tensor):
    """A tensor of the device, over the CPU tensor `cpu_tensor`."""

    cpu_tensor: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> PretendTensor:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            requires_grad=inner.requires_grad,
        )
        wrapper.cpu_tensor = inner
        return wrapper

    def tolist(self) -> Any:
        WAITS.append("tolist")
        return self.cpu_tensor.tolist()

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(operator, args, kwargs or {})


@torch.inference_mode(False)  # in which no wrapper can be made
def compute(operator: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives on the device."""
    moves = operator._schema.name in ("aten::_to_copy", "aten::copy_", "aten::_copy_from")
    plain_tensors: list[torch.Tensor] = []

    def held(value: Any) -> Any:
        if isinstance(value, PretendTensor):
            return value.cpu_tensor
        if isinstance(value, torch.Tensor):
            plain_tensors.append(value)
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

    inner, inner_kwargs = tree_map(held, (args, kwargs))
    indexes = operator._schema.name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_")
    if not moves and any(tensor.dim() and not indexes for tensor in plain_tensors):
        shapes = [tuple(tensor.shape) for tensor in plain_tensors]
        raise RuntimeError(f"{operator}: tensors on {NAME}:0 and on cpu, of shapes {shapes}")
    target = kwargs.get("device")
    leaves = target is not None and torch.device(target).type == "cpu"
    if leaves or operator._schema.name in _WAITING or (indexes and _has_mask(args)):
        WAITS.append(operator._schema.name)
    result = operator(*inner, **inner_kwargs)
    returns = operator._schema.returns
    for argument, value in zip(operator._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and returns and returns[0].alias_info:
            return value
    return tree_map(lambda leaf: PretendTensor(leaf) if isinstance(leaf, torch.Tensor) and not leaves else leaf, result)


class Backend(_DummyBackendModule):  # type: ignore[misc]
    """What torch asks of the device beside its operators."""

    def is_available(self) -> bool:
        """Not to libraries that would ask for its streams."""
        return False


def register() -> str:
    """Makes the device known to this process; gives its name."""
    _setup_privateuseone_for_python_backend(NAME, Backend())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda operator, *args, **kwargs: compute(operator, args, kwargs), "PrivateUse1")
    copies = torch.library.Library("aten", "IMPL")  # `torch.tensor` copies past both the class and the fallback
    copies.impl("copy_", lambda *args, **kwargs: compute(torch.ops.aten.copy_.default, args, kwargs), "PrivateUse1")
    globals()["_libraries"] = (library, copies)
    return NAME
