"""The optimizer, its warm-up, and gradient clipping."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from agentgym.errors import ConfigError
from agentgym.model.language_model import LanguageModel
from agentgym.settings.functions import convert_function_errors
from agentgym.trainers.algorithms.optimizers import BUILT_IN, OPTIMIZERS, make_optimizer, schedule_share
from agentgym.trainers.learner.master_weights import MasterWeights
from agentgym.trainers.learner.parameter_groups import divide_groups
from agentgym.trainers.learner.plain_optimizers import PlainAdamW, PlainMuon
from agentgym.trainers.learner.weight_average import WeightAverage
from agentgym.trainers.parallel.sharded_tensor import Gather, Stored, is_sharded, like, whole
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["PolicyOptimizer", "check_optimizer"]

logger = logging.getLogger(__name__)


class PolicyOptimizer:
    """The configured optimizer of a model's parameters, with its schedule; `num_steps` counts the steps taken.

    `position` is that in the schedule, which counts as many steps for each batch whether they are taken or not.
    `further` are parameters outside of the model that are trained with it, such as a head's. For bfloat16 parameters it
    keeps float32 masters, see `MasterWeights`. With `ema_decay` it keeps an average of the model's trained parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        further: Iterable[nn.Parameter] = (),
        ema_decay: float | None = None,
    ) -> None:
        self.config = config = config.for_size(sum(parameter.numel() for parameter in model.parameters()))
        self.total_steps = max(1, total_steps)
        self.num_steps = self.position = 0
        more = list(further)
        self.parameters = [*(parameter for parameter in model.parameters() if parameter.requires_grad), *more]
        self._masters = MasterWeights(self.parameters)
        self._masters_of_step = [self._masters.of(parameter) for parameter in self.parameters]
        self._parts = _make_parts(model, config, more, self._masters)
        for part in self._parts:
            divide_groups(part, model, config, self._masters.of)
        self._average: WeightAverage | None = None
        if ema_decay is not None:
            trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            stepped = {name: self._masters.of(parameter) for name, parameter in trained.items()}
            self._average = WeightAverage(trained, stepped, ema_decay)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, before the factors of `rates` and `layer_decay`."""
        config = self.config
        position = {"step": self.position, "total_steps": self.total_steps, "warmup_steps": config.num_warmup}
        warm = min(1.0, (self.num_steps + 1) / max(1, config.num_warmup))
        return config.peak_rate * warm * schedule_share(config.decay, config.decay_settings, position)

    def skip_to(self, position: int) -> None:
        """Moves the schedule forward past steps that were not taken; the warm-up counts those that are."""
        self.position = max(self.position, position)

    def step(self) -> float:
        """Clips the accumulated gradients, applies and clears them; returns their norm before clipping.

        A norm that is not finite changes nothing and is returned, for the caller to halt on.
        """
        self._masters.take_gradients()
        norm = _clip_gradients(self._masters_of_step, self.config.max_grad_norm)
        if norm == norm and norm != float("inf"):
            for part in self._parts:
                for group in part.param_groups:
                    group["lr"] = self.learning_rate * group.get("rate", 1.0)
                    if group.get("decoupled") and group["weight_decay"]:
                        _decay(group)
                part.step()
            torch.autograd.graph.increment_version(self._masters_of_step)  # which a fused step leaves as it was
            self._masters.round()
            if self._average is not None:
                self._average.update()
            self.num_steps += 1
            self.position += 1
        for part in self._parts:
            part.zero_grad(set_to_none=True)
        return norm

    def state_dict(self, gather: Gather = whole) -> dict[str, Any]:
        """The state that `load_state_dict` restores bitwise, in whole tensors or shards, see `Learner.state_dict`."""
        state = {"num_steps": self.num_steps, "parts": [_part_state(part, gather) for part in self._parts]}
        state |= {"position": self.position} if self.position != self.num_steps else {}
        state |= {"masters": self._masters.state()} if len(self._masters) else {}
        return state | ({} if self._average is None else {"average": self._average.state(gather)})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the saved state of an optimizer of the same model and configuration."""
        self.num_steps = state["num_steps"]
        self.position = state.get("position", self.num_steps)
        self._masters.load(state.get("masters", ()))
        if self._average is not None:
            self._average.load(state["average"])
        for part, saved in zip(self._parts, state["parts"], strict=True):
            own = [group["weight_decay"] for group in part.param_groups]
            part.load_state_dict(_state_like(part, saved))
            if own != [group.get("weight_decay", 0.0) for group in part.param_groups]:
                text = "optimizer.weight_decay had no effect on %s when the run began: it goes on without, as before"
                logger.warning(text, self.config.name)


@torch.no_grad()
def _decay(group: Mapping[str, Any]) -> None:
    """Takes the weight decay of a step off the weights that have a gradient."""
    for parameter in group["params"]:
        if parameter.grad is not None:
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])


def _clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scales gradients down to a norm of `max_norm`; returns their norm before.

    Experts that ranks divide are on another mesh than all other parameters, and torch's functions take those of one.
    """
    by_mesh: dict[object, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        by_mesh[parameter.device_mesh if is_sharded(parameter) else None].append(parameter)
    gradients = [[parameter.grad for parameter in own if parameter.grad is not None] for own in by_mesh.values()]
    norms = [whole(nn.utils.get_total_norm(own)) for own in gradients]
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for own in by_mesh.values():
        nn.utils.clip_grads_with_norm_(own, max_norm, norm)
    return float(norm)


def _part_state(part: torch.optim.Optimizer, gather: Gather) -> dict[str, Any]:
    saved, parameters = part.state_dict(), _parameters(part)
    return {
        **saved,
        "state": {
            index: {name: gather(tensor, of=parameters[index]) for name, tensor in state.items()}
            for index, state in saved["state"].items()
        },
    }


def _state_like(part: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state, sharded as the optimizer's parameters are; one number for a whole parameter stays as it is."""
    parameters = _parameters(part)

    def cut(tensor: Tensor | Stored, parameter: Tensor) -> Tensor:
        return like(tensor, parameter if tensor.shape == parameter.shape else torch.empty(tensor.shape))

    return {
        **saved,
        "state": {
            index: {name: cut(tensor, parameters[index]) for name, tensor in state.items()}
            for index, state in saved["state"].items()
        },
    }


def _parameters(part: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in part.param_groups for parameter in group["params"]]


def _ends(model: nn.Module) -> list[nn.Parameter]:
    """Returns the embedding and the head of a language model."""
    ends = [model.embed, model.head_weight] if isinstance(model, LanguageModel) else []
    return [parameter for parameter in ends if isinstance(parameter, nn.Parameter)]


def _make_parts(
    model: nn.Module, config: OptimizerConfig, further: Sequence[nn.Parameter], masters: MasterWeights
) -> list[torch.optim.Optimizer]:
    pairs = [(name, masters.of(parameter)) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return PlainAdamW(
            [*parameters, *map(masters.of, further)],
            lr=config.peak_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    if config.name == "adamw":
        return [adamw(parameter for _, parameter in pairs)]
    if config.name != "muon":
        parameters = [*(parameter for _, parameter in pairs), *map(masters.of, further)]
        return [_make_named(config, parameters)]
    # Muon is for the matrices between hidden states; embeddings, head and norms go to AdamW, as its authors say.
    ends = {id(masters.of(parameter)) for parameter in _ends(model)}
    matrices = [parameter for _, parameter in pairs if parameter.ndim == 2 and id(parameter) not in ends]
    if not matrices:  # adapters of stacks of experts alone
        return [adamw(parameter for _, parameter in pairs)]
    chosen = {id(parameter) for parameter in matrices}
    muon = PlainMuon(matrices, lr=config.peak_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
    rest = [parameter for _, parameter in pairs if id(parameter) not in chosen]
    return [muon, adamw(rest)] if rest or further else [muon]


def _make_named(config: OptimizerConfig, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Returns the configured optimizer of the table, with the weight decay and the betas.

    A group of a class without weight decay is marked `decoupled`: its weights are to be decayed before its step.
    """
    optimizer = make_optimizer(config.name or "", parameters, config.peak_rate, config.settings)
    for group in optimizer.param_groups:
        if "weight_decay" not in group:
            group |= {"weight_decay": config.weight_decay, "decoupled": True}
        elif config.weight_decay and not config.settings.get("weight_decay"):
            group["weight_decay"] = config.weight_decay
        if "betas" in group and config.own_betas:
            group["betas"] = config.own_betas
    return optimizer


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def check_optimizer(config: OptimizerConfig, *, is_resumed: bool = False) -> None:
    """Raises an error if an optimizer cannot work or a setting of it has no effect; tries one step on a small matrix.

    A run that `is_resumed` goes on without such a setting, as it began, with a warning.
    """
    name = config.name or BUILT_IN[0]
    if name in BUILT_IN:
        if config.settings:
            raise ConfigError(f"optimizer.settings are those of other optimizers than {name}: leave them out")
        return
    parameter = torch.zeros(2, 2, requires_grad=True)
    optimizer = _make_named(replace(config, name=name, learning_rate=config.learning_rate or 1e-6), [parameter])
    idle = ""
    if config.own_betas and not all("betas" in group for group in optimizer.param_groups):
        idle = f"optimizer.betas have no effect on {name}, which has no such means"
    elif config.weight_decay and config.settings.get("weight_decay"):
        idle = "optimizer.weight_decay has no effect, since optimizer.settings has one too"
    if idle and not is_resumed:
        raise ConfigError(f"{idle}: leave it out")
    if idle:
        _warn_once(f"{idle}: the run goes on as it began")
    parameter.grad = torch.ones(2, 2)
    with convert_function_errors(name, OPTIMIZERS[name]):
        optimizer.step()
