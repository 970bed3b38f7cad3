"""An advantage estimator by its name: its inputs, and a call that checks the inputs and the result of any estimator.

Shapes: `B` trained episode, `T` its sampled tokens, padded to the longest, `K` component of the reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor

from agentgym.errors import AgentGymError, ConfigError, InvalidTrajectory, TrainingHalted
from agentgym.settings.functions import convert_function_errors, settings_of, with_settings
from agentgym.trainers.algorithms.advantages.credit import Credit, check_rewards
from agentgym.trainers.algorithms.advantages.registry import ADVANTAGES, ESTIMATOR_INPUTS

__all__ = ["check_estimator", "check_penalized", "check_settings", "estimate", "needs_groups", "needs_input"]

MAX_COMPONENTS = 16
"""The most reward components that a trial tries; their actual number is known once an episode was played."""


def check_estimator(name: str, settings: Mapping[str, object]) -> None:
    """Raises an error if the estimator or its settings cannot work; tries it on a step of two groups.

    Raises UnknownName for an estimator that does not exist, ConfigError for a setting that it does not have, of another
    type or out of its bounds, and for an estimator whose result is not a Credit.
    """
    _ = _try_estimator(name, settings)


def check_penalized(name: str, settings: Mapping[str, object]) -> None:
    """Raises ConfigError for an estimator that does not work with a penalty in the rewards.

    That is one whose credit the penalty does not change, or that refuses rewards which a penalty has made negative. It
    is tried on a step of two groups, with and without a penalty.
    """
    remedy = "leave learner.kl.place at loss, or take another advantage"
    plain, credit = _try_estimator(name, settings)
    rewards_BT = plain["rewards_BT"]
    penalty_BT = 0.01 * torch.arange(rewards_BT.numel()).reshape(rewards_BT.shape).double()
    penalized = plain | {"rewards_BT": torch.where(plain["mask_BT"], rewards_BT - penalty_BT, rewards_BT)}
    try:
        penalized_credit = estimate(name, settings, penalized)
    except InvalidTrajectory as error:
        raise ConfigError(f"{name} cannot credit rewards that a KL penalty is taken off ({error}): {remedy}") from error
    if torch.equal(penalized_credit.advantages_BT, credit.advantages_BT):
        raise ConfigError(f"{name} gives the same advantages whatever KL penalty is taken off the rewards: {remedy}")


def _try_estimator(name: str, settings: Mapping[str, object]) -> tuple[dict[str, Tensor], Credit]:
    """Returns a step that the estimator can credit, and its credit."""
    check_settings(name, settings)
    max_components = MAX_COMPONENTS if needs_input(name, "components_BTK") else 1
    refusals: list[AgentGymError] = []
    for num_components in range(1, max_components + 1):
        step = _trial(num_components)
        try:
            return step, estimate(name, settings, step)
        except AgentGymError as error:
            refusals.append(error)  # it may be made for another number of components
    raise refusals[-1]


def check_settings(name: str, settings: Mapping[str, object]) -> None:
    """Raises UnknownName for an unknown estimator, and ConfigError for an unknown setting or one of another type."""
    with_settings(name, ADVANTAGES[name], settings, ESTIMATOR_INPUTS)


def needs_groups(name: str) -> bool:
    """True if an estimator compares episodes with others of their group, so that a group of one has no baseline."""
    return "allow_single" in settings_of(ADVANTAGES[name])


def needs_input(name: str, tensor: str) -> bool:
    """True if an estimator takes a tensor, such as `values_BT`."""
    return tensor in inspect.signature(ADVANTAGES[name]).parameters


def estimate(name: str, settings: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Credit:
    """The credit of each token, 0 where nothing is trained, from those of the tensors that the estimator takes.

    Raises ConfigError if one of them is missing, or if the estimator does not return a Credit with one number for each
    token; TrainingHalted for a number that is not finite in float32; UserCodeFault if an estimator of the user's
    raises.
    """
    function, mask_BT = ADVANTAGES[name], tensors["mask_BT"]
    parameters = inspect.signature(function).parameters
    needed = [key for key, part in parameters.items() if key in ESTIMATOR_INPUTS and part.default is part.empty]
    if lacking := [key for key in needed if key not in tensors]:
        raise ConfigError(f"{name} takes {', '.join(lacking)}, which was not given with the episodes (CreditInputs)")
    check_rewards(tensors["rewards_BT"], mask_BT)
    keywords = dict(settings)
    if "allow_single" in parameters:  # what is left of a larger group may be one episode
        keywords["allow_single"] = True
    with convert_function_errors(f"the advantage estimator {name!r}", function):
        credit: object = function(**{key: value for key, value in tensors.items() if key in parameters}, **keywords)
    if not isinstance(credit, Credit):
        form = "Credit(advantages_BT, returns_BT) was wanted"
        raise ConfigError(f"advantage estimator {name!r} gives a {type(credit).__name__}, and {form}")
    return Credit(
        _check_numbers(name, "advantages", credit.advantages_BT, mask_BT),
        _check_numbers(name, "returns", credit.returns_BT, mask_BT),
    )


def _check_numbers(name: str, what: str, numbers_BT: object, mask_BT: Tensor) -> Tensor:
    if not isinstance(numbers_BT, Tensor) or numbers_BT.shape != mask_BT.shape:
        found_kind = (
            f"shape {tuple(numbers_BT.shape)}"
            if isinstance(numbers_BT, Tensor)
            else f"type {type(numbers_BT).__name__}"
        )
        raise ConfigError(
            f"advantage estimator {name!r} gives {what} of {found_kind}, and one for each token of each episode, "
            f"{tuple(mask_BT.shape)}, was wanted"
        )
    number_BT = torch.where(mask_BT, numbers_BT.detach(), 0.0)
    fits_BT = number_BT.to(torch.float32).isfinite()  # what a batch holds
    if not bool(fits_BT.all()):
        wrong = float(number_BT[~fits_BT][0])
        raise TrainingHalted(
            f"advantage estimator {name!r} gives {what} of {wrong:g} at a trained token, which cannot be trained on:"
            " look at the rewards of this step"
        )
    return number_BT


def _trial(num_components: int) -> dict[str, Tensor]:
    """The tensors of a step of two groups of four episodes, of two turns each; one episode is longer by a token."""
    num_tokens = torch.tensor([3, 3, 3, 4] * 2)[:, None]
    place_BT = torch.arange(4).expand(8, 4)
    exists_BT = place_BT < num_tokens
    rewards_BT = torch.zeros(8, 4, dtype=torch.float64).scatter(1, num_tokens - 1, 1.0)
    rewards_BT[::2] = 0.0
    turns_BT = torch.where(exists_BT, place_BT // 2, -1)
    half_BT = torch.where(exists_BT, 0.5, 0.0).double()
    return {
        "rewards_BT": rewards_BT,
        "mask_BT": exists_BT & (place_BT != 1),
        "groups_B": torch.arange(8) // 4,
        "turns_BT": turns_BT,
        "states_BT": turns_BT.clone(),
        "values_BT": half_BT,
        "proxy_BT": half_BT.clone(),
        "bootstrap_B": torch.zeros(8, dtype=torch.float64),
        "greedy_B": torch.full((8,), 0.5, dtype=torch.float64),
        "components_BTK": rewards_BT[:, :, None].repeat(1, 1, num_components),
    }
