"""The weights that a learner publishes to its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from agentgym.types import JSON

__all__ = ["LoraWeights", "Weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraWeights:
    """An adapter alone, on top of the weights that the engine has; sent if only adapters are trained."""

    tensors: Mapping[str, object]
    """The tensors by parameter name, as PEFT publishes it (`base_model.model....lora_A.weight`)."""
    config: Mapping[str, JSON]
    """PEFT's `adapter_config.json`: at least `r`, `lora_alpha`, `target_modules`, `peft_type`."""


Weights: TypeAlias = "Mapping[str, object] | LoraWeights"
"""The tensors by parameter name; an in-process engine that shares the trained tensors ignores them."""
