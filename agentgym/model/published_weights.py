"""The weights that a learner publishes to its engine, and the form in which models of transformers publish theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from agentgym.types import JSON

if TYPE_CHECKING:  # engines that run elsewhere need the names of weights, and no torch
    from torch import Tensor, nn

__all__ = ["LoraWeights", "Weights", "named_tensors", "projection_names", "publish_blocks", "published_form"]

BASE = ".adapted_base."
"""The part of a tensor's name that an adapter adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraWeights:
    """An adapter alone, on top of the weights that the engine has; sent if only adapters are trained."""

    tensors: Mapping[str, object]
    """The tensors by parameter name, as PEFT publishes it (`base_model.model....lora_A.weight`)."""
    config: Mapping[str, JSON]
    """PEFT's `adapter_config.json`: at least `r`, `lora_alpha`, `target_modules`, `peft_type`."""


Weights: TypeAlias = "Mapping[str, object] | LoraWeights"
"""The tensors by parameter name; an in-process engine that shares the trained tensors ignores them."""


def published_form(hf: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of a model of transformers, given by its own names, as they are published: views, if they can be.

    Transformers may store the experts of a layer as one tensor, of which published checkpoints have the parts.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with _conversions_give_views():
        return dict(revert_weight_conversion(hf, tensors))


def named_tensors(hf: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a model of transformers by its own name, without those of adapters."""
    tensor_ids: set[int] = set()
    for name, tensor in hf.state_dict(keep_vars=True).items():
        if id(tensor) not in tensor_ids and ".adapter." not in name:  # a tied head is the embedding
            tensor_ids.add(id(tensor))
            yield name.replace(BASE, "."), tensor


def projection_names(hf: Any, name: str, stack: Tensor) -> tuple[str, ...]:
    """Returns the published names of the projections in one tensor of experts, in the order of their outputs.

    The names lack their module: `("gate_proj", "up_proj")`, or `("w1", "w3")`.
    """
    published = (key.removesuffix(".weight").rpartition(".")[2] for key in published_form(hf, {name: stack.detach()}))
    return tuple(dict.fromkeys(published))


def publish_blocks(
    hf: Any, blocks: Iterable[nn.Module], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors, given by the model's own names, under their published names, those of a block at once."""
    inside = set(blocks)
    prefixes = [f"{name}." for name, module in hf.named_modules() if module in inside]

    def block_of(pair: tuple[str, Tensor]) -> str:
        return next((prefix for prefix in prefixes if pair[0].startswith(prefix)), "")

    for _, own in groupby(tensors, block_of):
        yield from published_form(hf, dict(own)).items()


def _conversions_give_views() -> Any:
    """Returns a context in which `contiguous` returns its argument, since a conversion calls it on each part."""
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    class Views(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))

    return Views()
