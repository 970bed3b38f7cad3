"""Applies an off-policy correction to a step's batch.

Shapes: `N` packed tokens, `M` trained targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from agentgym.errors import ConfigError, TrainingHalted
from agentgym.settings.functions import convert_function_errors, with_settings
from agentgym.trainers.algorithms.corrections import CORRECTION_INPUTS, CORRECTIONS, Correction, proximal_logp
from agentgym.trainers.batch.batch import TrainingBatch

__all__ = ["check_correction", "corrected_batch"]


def check_correction(name: str, settings: Mapping[str, object]) -> None:
    """Raises an error if the correction or its settings cannot work; tries it on a few tokens.

    Raises UnknownName for a correction that does not exist, and ConfigError for a setting that it does not have or that
    cannot work, and for a correction that does not return a Correction.
    """
    with_settings(name, CORRECTIONS[name], settings, CORRECTION_INPUTS)
    old_M, sampled_M = torch.tensor([-1.0, -1.0, -2.0, -0.5]), torch.tensor([-1.0, -1.1, -1.9, -0.5])
    _correct(name, settings, (old_M, sampled_M), torch.tensor([0, 0, 1, 1]), (torch.zeros_like(old_M).long(), 0))


@torch.no_grad()
def corrected_batch(
    batch: TrainingBatch, old_M: Tensor, version: int, name: str, settings: Mapping[str, object]
) -> TrainingBatch:
    """The batch with the correction's weights, and with the logprobs that the loss takes its ratio against.

    `old_M` are the logprobs of the trained targets under the weights before the step, which are the policy `version`.
    Raises what `check_correction` raises, and TrainingHalted for a weight that is not finite.
    """
    mask_N = batch.mask_N.cpu()
    sampled_M, versions_M, trajectory_M = (
        tensor.cpu()[mask_N] for tensor in (batch.sampled_logp_N, batch.policy_version_N, batch.trajectory_N)
    )
    weights_M = _correct(name, settings, (old_M, sampled_M), trajectory_M, (versions_M, version))
    if name == "proximal_by_version":
        all_M = torch.ones_like(old_M, dtype=torch.bool)
        old_M = proximal_logp(old_M, sampled_M, all_M, versions=versions_M, current=version)

    def scatter_to_targets(values_M: Tensor) -> Tensor:
        return torch.zeros_like(batch.old_logp_N, device="cpu").masked_scatter(mask_N, values_M.float())

    corrected = replace(
        batch, old_logp_N=scatter_to_targets(old_M.clamp(max=0)), correction_N=scatter_to_targets(weights_M)
    )
    return corrected.to(batch.ids_N.device)


def _correct(
    name: str,
    settings: Mapping[str, object],
    logps: tuple[Tensor, Tensor],
    trajectory_M: Tensor,
    versions: tuple[Tensor, int],
) -> Tensor:
    """The weight of each target.

    `logps` are those under the weights before the step and those of the sampling; `versions` are the weights that
    sampled each target, and the newest.
    """
    function, (old_M, sampled_M) = CORRECTIONS[name], logps
    inputs = dict(zip(CORRECTION_INPUTS, (trajectory_M, *versions), strict=True))
    parameters = inspect.signature(function).parameters
    keywords = {key: value for key, value in inputs.items() if key in parameters or key == "sequences"}
    all_M = torch.ones_like(old_M, dtype=torch.bool)
    with convert_function_errors(f"the off-policy correction {name!r}", function):
        correction: object = function(old_M, sampled_M, all_M, **keywords, **settings)
    if not isinstance(correction, Correction):
        expectation = "Correction(weights, kept) was wanted"
        raise ConfigError(f"off-policy correction {name!r} gives a {type(correction).__name__}, and {expectation}")
    weights: object = correction.weights
    if not isinstance(weights, Tensor) or weights.shape != old_M.shape:
        kind = f"shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else f"type {type(weights).__name__}"
        raise ConfigError(
            f"off-policy correction {name!r} gives weights of {kind}, and one for each token, {tuple(old_M.shape)}, "
            "was wanted"
        )
    if not bool(weights.isfinite().all()):
        raise TrainingHalted(f"off-policy correction {name!r} gives a weight that is not finite")
    return weights.detach()
