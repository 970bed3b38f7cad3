"""The table of advantage estimators and the contract of its entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from agentgym.registry import Registry
from agentgym.settings.functions import Contract
from agentgym.trainers.algorithms.advantages.credit import Credit

__all__ = ["ADVANTAGES", "AdvantageEstimator"]

AdvantageEstimator: TypeAlias = Callable[..., Credit]
"""`estimator(rewards_BT, mask_BT, groups_B, *further tensors, **settings) -> Credit`.

`B` counts the episodes that are trained (those that failed are left out beforehand) and `T` the tokens of the longest;
the order of the rows does not matter, and an episode is one row, so that every baseline counts it once.

    rewards_BT      float; the reward that arrived at each token, padding 0. One at a token that is not trained counts
                    at the nearest trained token before it, or at the first one where there is none before
    mask_BT         bool; the tokens that are trained, with any holes
    groups_B        int64; rows with the same id are episodes of the same task, in any order

An estimator names further tensors that it needs as parameters, out of these; the caller passes them by name:

    values_BT       float; the critic's value of what came before the token
    bootstrap_B     float; the value after the last token: 0 where the episode terminated, the critic's where it was
                    truncated. Zeros when left out
    turns_BT        int64; the turn of each token, counted up, -1 for a token of no turn
    states_BT       int64; the state of the environment in which the token's turn was sampled: equal ids are equal
                    states, -1 is none
    greedy_B        float; the reward of a greedy episode of the same task
    components_BTK  float; the rewards by component, each at the same tokens as in `rewards_BT`; NaN at the last one
                    where an episode lacks the component
    proxy_BT        float; `1 - 2 p + sum p^2`, the squared norm of the logits' gradient

Settings are keyword-only. All raise InvalidTrajectory for tensors that do not fit together or hold numbers that are not
finite where they count, and those with a baseline of the group raise ConfigError for a group of one unless
`allow_single`, where its advantage is then 0. (A caller that leaves failed episodes out checks its group size itself
and passes `allow_single`.)
"""

ESTIMATOR_INPUTS = (
    "rewards_BT",
    "mask_BT",
    "groups_B",
    "values_BT",
    "bootstrap_B",
    "turns_BT",
    "states_BT",
    "greedy_B",
    "components_BTK",
    "proxy_BT",
)

ADVANTAGES: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    "`agentgym algorithms list` shows all, `agentgym new algorithm NAME` writes one to start from.",
    check=Contract("advantage estimator", (), optional=ESTIMATOR_INPUTS).check,
)
"""Every estimator by name; `ADVANTAGES.register(name)` adds one, and `path/to/file.py:name` is one of a file."""
