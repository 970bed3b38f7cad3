"""The parameters that are trained, and the learning rates and weight decays of some: by name or depth of layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import published_views
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["divide_groups", "ready_to_train"]

Own: TypeAlias = tuple[float, float | None]
"""A factor of the learning rate, and a weight decay; None is that of the optimizer."""


def divide_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, config: OptimizerConfig, of: Callable[[nn.Parameter], Tensor]
) -> None:
    """Divides the parameter groups of a new optimizer by their settings; a group's `rate` is its factor of the rate.

    `of` returns the tensor that is stepped on for a parameter of the model. Raises ConfigError for a pattern that no
    trained parameter has in its name, or that only a part of one has.
    """
    if not config.has_groups:
        return
    settings: dict[Tensor, Own] = {of(parameter): own for parameter, own in _own_settings(model, config)}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts: dict[Own, list[Tensor]] = defaultdict(list)
        for tensor in group["params"]:
            parts[settings.get(tensor, (1.0, None))].append(tensor)
        for (rate, decay), tensors in parts.items():
            decayed = {} if decay is None else {"weight_decay": decay}
            groups.append({**group, **decayed, "params": tensors, "rate": rate})
    optimizer.param_groups[:] = groups


def _own_settings(model: nn.Module, config: OptimizerConfig) -> Iterator[tuple[nn.Parameter, Own]]:
    """Yields the trained parameters with their settings."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = _published_names(model)
    published_by_name = {name: names.get(name, (_plain_name(name),)) for name in trained}
    rates, decays = (_find_own(values, published_by_name) for values in (config.rates, config.weight_decays))
    heights = _heights(model)
    for name, parameter in trained.items():
        depth_factor = config.layer_decay ** heights.get(name, 0)
        yield parameter, (rates.get(name, 1.0) * depth_factor, decays.get(name))


def _find_own(values: Mapping[str, float], published_by_name: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Returns the value of the first pattern that each parameter has in its name, by parameter."""
    own_values: dict[str, float] = {}
    used: set[str] = set()
    for name, published in published_by_name.items():
        first = [next((pattern for pattern in values if re.search(pattern, own)), None) for own in published]
        used |= {pattern for pattern in first if pattern is not None}
        if len({None if pattern is None else values[pattern] for pattern in first}) > 1:
            raise ConfigError(
                f"{', '.join(published)} are one tensor here, and {', '.join(filter(None, first))} has a part of them:"
                " give all of them one value, or train with model_backend transformers"
            )
        if first[0] is not None:
            own_values[name] = values[first[0]]
    if unused := [pattern for pattern in values if pattern not in used]:
        examples = [published[0] for published in published_by_name.values()]
        raise ConfigError(
            f"no trained parameter has {unused[0]!r} in its name; names are such as {examples[0]}, {examples[-1]}"
        )
    return own_values


def _published_names(model: nn.Module) -> dict[str, list[str]]:
    """Returns the published names of a decoder's parameters, by its own names: several of those that it has in one."""
    if not isinstance(model, Decoder):
        return {}
    with torch.device("meta"):
        blank = Decoder(model.config)
    own = {id(parameter): name for name, parameter in blank.named_parameters()}
    names: dict[str, list[str]] = defaultdict(list)
    newest = ""

    def note(parameter: Tensor) -> Tensor:
        nonlocal newest
        newest = own[id(parameter)]
        return parameter

    for published, _ in published_views(blank, note):
        names[newest].append(published)
    return names


def _plain_name(name: str) -> str:
    """Returns the name of a parameter without what wraps it here."""
    return name.removeprefix("hf.").replace("adapters._adapters.", "").replace(".adapted_base.", ".")


def _heights(model: nn.Module) -> dict[str, int]:
    """Returns how many layers are above a parameter's own, counting it: 1 for the last layer, the most for embeddings.

    Parameters after the last layer are left out. A tied head is the embedding.
    """
    if not isinstance(model, LanguageModel):
        return {}
    numbers = {name: _layer_number(name) for name, _ in model.named_parameters()}
    num_layers = 1 + max((number for number in numbers.values() if number is not None), default=-1)
    heights = {name: num_layers - number for name, number in numbers.items() if number is not None}
    below = {name for name, _ in model.named_parameters() if name not in heights and "emb" in name}
    return heights | dict.fromkeys(below, num_layers + 1)


def _layer_number(name: str) -> int | None:
    match = re.search(r"\b(?:layers|layer|blocks|block|h)\.(\d+)\.", name)
    return int(match[1]) if match else None


def ready_to_train(model: LanguageModel, config: LearnerConfig) -> LanguageModel:
    """Prepares a model for training as the settings want it, and returns it."""
    model.set_recompute(config.activation_checkpointing)
    if config.router.frozen:
        model.freeze_routers()
    return model
