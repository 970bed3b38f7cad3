"""Training adapters in place of the weights (LoRA, Hu et al. 2021): their initialization, and their merged weights.

The base stays unchanged, bit for bit, and without the adapters it is the reference of a KL term. Engines, checkpoints
and exports have the weights with the adapters merged in. Names, initial values and the scale are those of the peft
package, so that training of an adapter can continue there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder, DecoderLayer
from agentgym.model.decoder_config import QKV
from agentgym.model.language_model import LanguageModel
from agentgym.model.lora_layer import AdaptedWeight, Adapter, LayerAdapters, adapters_off
from agentgym.model.model_folder import published_views
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.published_weights import named_tensors, publish_blocks
from agentgym.model.transformers_model import TransformersModel
from agentgym.rollout.seeds import derive
from agentgym.trainers.parallel.sharded_tensor import Gather, Stored, is_sharded, like, whole
from agentgym.trainers.settings.lora import PROJECTIONS, LoraConfig

__all__ = ["Adapters", "Unadapted", "adapt"]


MATRICES = ("qkv", "out", "gate_up", "down")
"""The parameters of a layer that have adapters."""

_OTHER_BASE = "{}: the base is the model that the adapters were trained on, unchanged"

T = TypeVar("T")
Model = TypeVar("Model", bound=LanguageModel)


def adapt(model: Model, config: LoraConfig) -> Model:
    """Freezes the model and adds adapters that add nothing yet; a model to be sharded gets them before.

    Raises ConfigError for a name among `config.target_modules` that no layer has.
    """
    model.requires_grad_(False)
    scale = config.alpha / config.rank
    if isinstance(model, TransformersModel):
        targets = None if config.target_modules == PROJECTIONS else config.target_modules
        model.adapt(targets, rank=config.rank, scale=scale)
    for layer in _layers(model):
        if unknown := sorted(set(config.target_modules) - set(layer.projections)):
            names = ", ".join(layer.projections)
            raise ConfigError(f"the model has no layer that is called {' or '.join(unknown)}; its layers are {names}")
        layer.adapters = LayerAdapters(layer.projections, config.target_modules, rank=config.rank, scale=scale)
        layer.adapters.to(model.embed.device, model.embed.dtype)
    for name, adapter in _named_adapters(model):
        first_RI = torch.empty(adapter.A_RI.flatten(0, -2).shape)  # of all experts at once, as peft does
        nn.init.kaiming_uniform_(first_RI, math.sqrt(5), generator=_generator(config.seed or 0, name))
        with torch.no_grad():
            adapter.A_RI.copy_(first_RI.view(adapter.A_RI.shape))
    return model


class Adapters:
    """The adapters of a decoder and the weights under them.

    Each rank of a sharded model has an object of its own, and all ranks call the same methods in the same order.
    """

    def __init__(self, model: LanguageModel, config: LoraConfig, published: LanguageModel | None = None) -> None:
        self.model, self.config = model, config
        self.published = published
        """A model that is kept equal to the weights with their adapters merged in; None for none."""
        self.merge_lost: float | None = None
        """The share of what the adapters add that the weights lost when they were merged last, in a type shorter than
        float32: the norm of the rounding error over that of the sum. None in float32, and if they add nothing."""
        self._by_name = dict(_named_adapters(model))
        self._weights = {weight.name: weight for weight in _adapted_weights(model)}

    @classmethod
    def of(cls, model: LanguageModel, base: LanguageModel | None, config: LoraConfig) -> Adapters:
        """Returns adapters on the weights of `base`; the model is kept equal to both merged.

        Without a base they are on the model itself. Raises ConfigError for a sharded model that had no adapters before
        it was sharded.
        """
        if is_sharded(model.embed):
            if base is not None or next(_named_adapters(model), None) is None:
                raise ConfigError("a model gets its adapters before it is sharded: ranks.shard(adapt(model, config))")
            return cls(model, config)
        if base is None:
            return cls(adapt(model, config), config)
        adapters = cls(adapt(base, config), config, model)
        adapters._share()
        return adapters

    @property
    def reference(self) -> Unadapted:
        """The model without its adapters; it has no weights of its own."""
        return Unadapted(self.model)

    @torch.no_grad()
    def merged_weights(self, *, adapted_only: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields weights whole, by published name, with adapters merged in: those with an adapter, or all."""
        merged = self._merge_weights(adapted_only=adapted_only)
        model = self.model
        yield from publish_blocks(model.hf, model.blocks, merged) if isinstance(model, TransformersModel) else merged

    def _merge_weights(self, *, adapted_only: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields weights by the name of the model's own module, see `merged_weights`; then sets `merge_lost`."""
        scale, errors, sums = self.config.alpha / self.config.rank, [], []
        for name, tensor in self._own_weights(self.model, whole):
            if name in self._weights:
                weight = self._weights[name]
                merged = weight.merge(tensor, scale, whole)
                if merged.dtype != torch.float32:
                    left, right = weight.factors(whole)
                    sums.append(left.float() @ right.float() * scale)
                    errors.append((merged.float() - tensor.float() - sums[-1]).norm())
                    sums[-1] = sums[-1].norm()
                yield name, merged
            elif not adapted_only:
                yield name, tensor
        added = float(torch.stack(sums).norm()) if sums else 0.0
        self.merge_lost = float(torch.stack(errors).norm()) / added if added else None

    @staticmethod
    def _own_weights(
        model: LanguageModel, view: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights of a model by the names of its own modules, without adapters."""
        if isinstance(model, TransformersModel):
            yield from ((name, view(tensor)) for name, tensor in named_tensors(model.hf))
        else:
            yield from published_views(model, view)

    @torch.no_grad()
    def publish(self) -> None:
        """Writes the merged weights to the published model."""
        if self.published is not None:
            views = dict(self._own_weights(self.published))
            for name, merged in self._merge_weights():
                views[name].copy_(merged)

    @torch.no_grad()
    def merge(self) -> LanguageModel:
        """Merges the adapters into the weights and removes them; returns an ordinary model."""
        views = dict(self._own_weights(self.model))
        for name, merged in self._merge_weights():
            views[name].copy_(merged)
        for layer in _layers(self.model):
            layer.adapters = None
        if isinstance(self.model, TransformersModel):
            self.model.remove_adapters()
        return self.model.requires_grad_(True)

    def state_dict(self, gather: Gather = whole) -> dict[str, Any]:
        """The state that `load_state_dict` restores bitwise: tensors by their projections, and the settings.

        `stacks` are the projections in each parameter that has all experts of a layer; `transposed` says that the
        weights of linear layers are `[I, O]`; `base` are the norms of the weights under the adapters.
        """
        stacks = {weight.name: list(weight.adapters) for weight in self._weights.values() if weight.is_stack}
        tensors = {name: gather(tensor) for name, tensor in self._tensors()}
        transposed = any(weight.is_transposed for weight in self._weights.values() if not weight.is_stack)
        state = {"settings": asdict(self.config), "tensors": tensors, "stacks": stacks, "transposed": transposed}
        return state | {"base": self._base_norms}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the saved state of adapters of the same configuration; `publish` then updates the published model.

        Raises ConfigError for a state of adapters on other weights.
        """
        tensors: dict[str, Tensor | Stored] = dict(state["tensors"])
        own = dict(self._tensors())
        if tensors.keys() != own.keys() or any(tensors[name].shape != own[name].shape for name in own):
            raise ConfigError(
                f"the state is of other adapters: it has {len(tensors)} tensors with the settings"
                f" {state['settings']}, and wanted are {len(own)} with {asdict(self.config)}"
            )
        norms = state.get("base", {})  # checkpoints of earlier versions have none
        if norms and any(not math.isclose(norm, norms.get(name, 0.0)) for name, norm in self._base_norms.items()):
            raise ConfigError(_OTHER_BASE.format("the weights under the adapters are others than when they were saved"))
        for name, parameter in own.items():
            parameter.copy_(like(tensors[name], parameter))

    @cached_property
    def _base_norms(self) -> dict[str, float]:
        """The norm of each weight under adapters, whole; all ranks ask for it together."""
        weights = ((name, tensor) for name, tensor in self._own_weights(self.model, whole) if name in self._weights)
        return {name: float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for name, tensor in weights}

    def _tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, adapter in self._by_name.items():
            yield f"base_model.model.{name}.lora_A.weight", adapter.A_RI
            yield f"base_model.model.{name}.lora_B.weight", adapter.B_OR

    def _share(self) -> None:
        """Frees the base's copies of parameters without adapters, by sharing those of the published model."""
        assert self.published is not None
        theirs = dict(self.published.named_parameters())
        for path, parameter in list(self.model.named_parameters()):
            owner, _, name = path.rpartition(".")
            if (name in MATRICES and isinstance(self.model, Decoder)) or path not in theirs:
                continue
            if path.removeprefix("hf.") in self._weights:  # a stack of experts
                continue
            if not torch.equal(parameter, theirs[path]):
                difference = f"{path!r} is another one in the model and in the base under its adapters"
                raise ConfigError(_OTHER_BASE.format(difference))
            same = nn.Parameter(theirs[path].detach(), requires_grad=False)
            setattr(self.model.get_submodule(owner), name, same)
        if isinstance(self.model, TransformersModel):
            self.model.hf.tie_weights()


class Unadapted:
    """A model without its adapters, on the same weights: the reference of a KL term."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    @property
    def softcap(self) -> float | None:
        """The soft cap of the model's logits; None for none."""
        return self._model.softcap

    @property
    def embed(self) -> Tensor:
        """The `[V, E]` embedding of the model."""
        return self._model.embed

    def __call__(self, ids_N: Tensor, layout: PackedLayout, reader: Callable[[Tensor, Tensor], T]) -> T:
        """Returns what `LanguageModel.forward` returns without the adapters."""
        with adapters_off():
            result: T = self._model(ids_N, layout, reader)
            return result


def _layers(model: LanguageModel) -> Iterator[DecoderLayer]:
    for layer in model.layers if isinstance(model, Decoder) else ():
        assert isinstance(layer, DecoderLayer)
        yield layer


def _adapted_weights(model: LanguageModel) -> Iterator[AdaptedWeight]:
    """Yields each weight with adapters, by the name of `Adapters._own_weights`."""
    if isinstance(model, TransformersModel):
        yield from model.adapted_weights()
    for index, layer in enumerate(_layers(model)):
        if layer.adapters is not None:
            for name, adapter in layer.adapters.named_adapters():
                block = "self_attn" if name in QKV or name == "o_proj" else "mlp"
                path = f"model.layers.{index}.{block}.{name}"
                yield AdaptedWeight(f"{path}.weight", {path: adapter})


def _named_adapters(model: LanguageModel) -> Iterator[tuple[str, Adapter]]:
    """Yields each adapter with the published name of its module, such as `model.layers.0.self_attn.q_proj`."""
    for weight in _adapted_weights(model):
        yield from ((name, adapter) for name, adapter in weight.adapters.items() if adapter is not None)


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, "lora", name))
