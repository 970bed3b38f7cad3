"""The loss that a learner minimizes, by its settings."""

from __future__ import annotations

from agentgym.settings.functions import is_bundled
from agentgym.trainers.algorithms.corrections import CORRECTIONS
from agentgym.trainers.algorithms.kl import penalty_of
from agentgym.trainers.algorithms.losses import LOSSES, PolicyLossFn, is_silent_at_zero, loss_with, traits_of
from agentgym.trainers.batch.off_policy import check_correction
from agentgym.trainers.settings.kl import WHOLE
from agentgym.trainers.settings.learner import LearnerConfig

__all__ = ["balance_weight", "has_further_loss", "needs_all_rows", "policy_loss"]


def policy_loss(config: LearnerConfig) -> PolicyLossFn:
    """Returns the loss with its settings, after the correction and the KL penalty were tried too.

    Raises UnknownName or ConfigError for one that does not exist or cannot work with its settings.
    """
    if config.correction is not None:
        check_correction(config.correction, config.correction_settings)
    if config.kl.penalty != WHOLE:
        penalty_of(config.kl.penalty)
    return loss_with(config.loss_name, config.loss_settings or {})


def balance_weight(config: LearnerConfig, own: float) -> float:
    """Returns the weight of the load balancing loss; `own` is that of the model's config.json, which holds for None.

    With a loss that compares with a reference, None is 0: the gain of a reply is that of its tokens alone.
    """
    if config.router.balance is None and traits_of(LOSSES[config.loss_name]).against_reference:
        return 0.0
    return own if config.router.balance is None else config.router.balance


def has_further_loss(config: LearnerConfig, balance: float) -> bool:
    """Returns True if tokens that a correction rejects are learned from by another term than the policy's loss."""
    kl = config.kl.coefficient if config.kl.place == "loss" else 0.0
    return any((kl, config.entropy_coefficient, balance, config.critic.trunk == "shared"))


def needs_all_rows(config: LearnerConfig, own_balance: float = 0.0) -> bool:
    """Returns True if rows with an advantage of 0 are learned from too; `own_balance` is the model's own weight."""
    regularized = any((config.kl.coefficient, config.entropy_coefficient, balance_weight(config, own_balance)))
    silent = is_silent_at_zero(LOSSES[config.loss_name]) and not _corrects_by_mean(config)
    return regularized or config.critic.exists or not silent


def _corrects_by_mean(config: LearnerConfig) -> bool:
    """Returns True if the weights of rows may depend on each other: by their mean, or in a user's correction."""
    if config.correction is None:
        return False
    return bool(config.correction_settings.get("normalize")) or not is_bundled(CORRECTIONS[config.correction])
