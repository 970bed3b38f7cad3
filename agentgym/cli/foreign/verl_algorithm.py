"""The conversions of verl's algorithm: estimators, losses, KL terms, corrections, schedules, adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentgym.cli.foreign.keys import Converter, NoCounterpart, SameMeaning, Several, Theirs
from agentgym.cli.foreign.verl_values import ACTOR, verl_list

__all__ = [
    *("verl_advantage", "verl_aggregation", "verl_betas", "verl_correction", "verl_critic_of", "verl_kl_in_loss"),
    *("verl_kl_in_reward", "verl_lora_alpha", "verl_lora_layers", "verl_lora_rank", "verl_loss"),
    *("verl_optimizer", "verl_schedule", "verl_warmup", "verl_warmup_steps"),
]

LOSSES: Mapping[str, str] = {
    "vanilla": "ppo_clip",
    **{name: name for name in ("clip_cov", "kl_cov", "gspo", "geo_mean", "sapo", "gpg", "cispo", "dppo_tv", "dppo_kl")},
    "reinforce": "reinforce",
}
"""verl's `policy_loss.loss_mode`, and our losses."""
LOSS_SETTINGS: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "vanilla": {"dual_clip": ("clip_ratio_c", 3.0)},
    "clip_cov": {
        "fraction": ("policy_loss.clip_cov_ratio", 0.0002),
        "cov_low": ("policy_loss.clip_cov_lb", 1.0),
        "cov_high": ("policy_loss.clip_cov_ub", 5.0),
    },
    "kl_cov": {
        "fraction": ("policy_loss.kl_cov_ratio", 0.0002),
        "kl_coefficient": ("policy_loss.ppo_kl_coef", 0.1),
    },
    "sapo": {"tau_positive": ("tau_pos", 1.0), "tau_negative": ("tau_neg", 1.05)},
}
"""The settings of losses, with the keys below the actor's that they come from, and their defaults."""
CLIP_LOSSES = ("vanilla", "clip_cov", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
"""The losses with a bound on each side."""
ESTIMATORS: Mapping[str, str] = {
    **{
        name: name
        for name in (
            "gae grpo rloo reinforce_plus_plus_baseline opo gpg grpo_passk gdpo reinforce_plus_plus remax "
            "optimal_token_baseline tir_optimal_token_baseline".split()
        )
    },
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
"""verl's `algorithm.adv_estimator`, and our estimators."""
KL_NAMES: Mapping[str, str] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "low_var",
    "k3": "low_var",
    "k1+": "k1_st",
    "kl+": "k1_st",
    "low_var_kl+": "low_var_st",
    "k3+": "low_var_st",
}
"""verl's `kl_loss_type` and `kl_penalty`, and our penalties."""
OPTIMIZERS: Mapping[str, str] = {"AdamW": "adamw", "adam": "adamw", "SGD": "sgd", "Adafactor": "adafactor"}
"""verl's `optim.optimizer`, a name in torch.optim, and our optimizers."""
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
SEQUENCE_LOSSES = ("gspo", "sapo")
"""The losses that verl always aggregates by seq-mean-token-mean."""
DECAYS: Mapping[str, str] = {"constant": "constant", "cosine": "cosine"}


def verl_advantage(value: Any, theirs: Theirs) -> Several:
    """Returns the estimator with its settings."""
    name = ESTIMATORS.get(value)
    if name is None:
        raise NoCounterpart("no estimator of this name: `agentgym algorithms list`, or your own as file.py:name")
    settings: dict[str, Any] = {}
    by_std = theirs.get("algorithm.norm_adv_by_std_in_grpo", True)
    if name == "grpo" and not by_std:
        name = "dr_grpo"
    if name == "grpo_passk":
        settings["normalize_by_std"] = by_std
    if name in ("gae", "reinforce_plus_plus"):
        settings["gamma"] = theirs.get("algorithm.gamma", 1.0)
    if name == "gae":
        settings["lam"] = theirs.get("algorithm.lam", 1.0)
    more = {"learner.critic.bootstrap": False} if name == "gae" else {}
    return Several({"algo": name, **{f"advantage.settings.{key}": item for key, item in settings.items()}, **more})


def verl_loss(value: Any, theirs: Theirs) -> Several:
    """Returns the policy loss with its settings."""
    if value not in LOSSES:
        raise NoCounterpart("no loss of this name: `agentgym algorithms list`, or your own as file.py:name")
    settings = {name: theirs.get(ACTOR + key, default) for name, (key, default) in LOSS_SETTINGS.get(value, {}).items()}
    if value in CLIP_LOSSES:
        for name in ("low", "high"):
            bound = theirs.get(f"{ACTOR}clip_ratio_{name}", theirs.get(ACTOR + "clip_ratio", 0.2))
            settings[f"clip_{name}"] = bound
    return Several(
        {"learner.loss": LOSSES[value], **{f"learner.loss_settings.{key}": item for key, item in settings.items()}}
    )


def verl_aggregation(value: Any, theirs: Theirs) -> Several:
    """Returns the aggregation with its constant."""
    mode = theirs.get(ACTOR + "policy_loss.loss_mode")
    name = "seq-mean-token-mean" if mode in SEQUENCE_LOSSES else value
    if name not in AGGREGATIONS:
        raise NoCounterpart("no aggregation of this name: `agentgym algorithms list`, or your own as file.py:name")
    settings = Several({"aggregation": name})
    if name == "seq-mean-token-sum-norm" and (tokens := theirs.get(ACTOR + "loss_scale_factor")):
        settings["norm_tokens"] = int(tokens)
    return settings


def _penalty(value: Any) -> str:
    if value not in KL_NAMES:
        raise NoCounterpart(f"no KL penalty {value!r}: `agentgym algorithms list`")
    return KL_NAMES[value]


def verl_kl_in_loss(value: Any, theirs: Theirs) -> Several:
    """Returns the KL term of the loss."""
    if not value:
        raise SameMeaning("learner.kl.coefficient: 0")
    kind = theirs.get(ACTOR + "kl_loss_type", "low_var_kl")
    coefficient = theirs.get(ACTOR + "kl_loss_coef", 0.001)
    return Several({"learner.kl.coefficient": coefficient, "learner.kl.penalty": _penalty(kind)})


def verl_kl_in_reward(value: Any, theirs: Theirs) -> Several:
    """Returns the KL penalty of the reward, with its controller."""
    if not value:
        raise SameMeaning("learner.kl.coefficient: 0")
    if theirs.get(ACTOR + "use_kl_loss"):
        raise NoCounterpart("a run has one KL term, in the loss or in the reward; that of the loss was taken")
    control = "algorithm.kl_ctrl."
    settings = Several(
        {
            "learner.kl.place": "reward",
            "learner.kl.coefficient": theirs.get(control + "kl_coef", 0.001),
            "learner.kl.penalty": _penalty(theirs.get("algorithm.kl_penalty", "kl")),
        }
    )
    if theirs.get(control + "type", "fixed") == "adaptive":
        settings["learner.kl.target"] = theirs.get(control + "target_kl", 0.1)
        settings["learner.kl.horizon"] = theirs.get(control + "horizon", 10000)
    return settings


def verl_correction(value: Any, theirs: Theirs) -> Several:
    """Returns the weights for the difference between the sampler and the trainer."""
    prefix = "algorithm.rollout_correction."
    cap = theirs.get(prefix + "rollout_is_threshold", 2.0)
    normalize = theirs.get(prefix + "rollout_is_batch_normalize", False)
    if isinstance(cap, str) and "_" in cap and value == "token":
        low, high = (float(part) for part in cap.split("_"))
        settings, name = {"alpha": low, "beta": high}, "icepop"
    elif value in ("token", "sequence"):
        settings, name = {"cap": float(cap)}, f"tis_{value}"
    else:
        raise NoCounterpart("learner.correction has tis_token and tis_sequence")
    settings["normalize"] = normalize
    return Several(
        {"learner.correction": name, **{f"learner.correction_settings.{key}": item for key, item in settings.items()}}
    )


def verl_schedule(value: Any, theirs: Theirs) -> Several:
    """Returns the decay of the learning rate."""
    if value not in DECAYS:
        raise NoCounterpart("optimizer.decay is constant, linear or cosine, or your own as file.py:name")
    settings = Several({"optimizer.decay": DECAYS[value]})
    if value == "cosine" and (floor := theirs.get(ACTOR + "optim.min_lr_ratio")):
        settings["optimizer.decay_settings.floor"] = floor
    return settings


def verl_warmup(value: Any, theirs: Theirs) -> int:
    """Returns the steps of the warm-up, from a share of the steps."""
    total = theirs.get("trainer.total_training_steps")
    if not value:
        raise SameMeaning("optimizer.warmup_steps: 0")
    if theirs.get(ACTOR + "optim.lr_warmup_steps", -1) > 0:
        raise SameMeaning("lr_warmup_steps was taken")
    if not total:
        raise NoCounterpart("a share of steps that follow from the data: set optimizer.warmup_steps")
    return int(value * total)


def verl_critic_of(convert: Converter | None = None) -> Converter:
    """Returns a conversion of a critic's key, which counts where there is a critic (gae)."""

    def convert_critic(value: Any, theirs: Theirs) -> Any:
        if theirs.get("algorithm.adv_estimator") != "gae":
            raise SameMeaning("no critic without adv_estimator=gae")
        return value if convert is None else convert(value, theirs)

    return convert_critic


def verl_lora_rank(value: Any, theirs: Theirs) -> Several:
    """Returns the rank of adapters, which learn at the same rate as weights do in verl."""
    if not value:
        raise SameMeaning("learner.lora.rank: 0")
    return Several({"learner.lora.rank": value, "learner.lora.learning_rate": theirs.get(ACTOR + "optim.lr")})


def verl_lora_alpha(value: Any, theirs: Theirs) -> float:
    """Returns the scale of adapters."""
    if not any(theirs.get(f"actor_rollout_ref.model.{name}") for name in ("lora_rank", "lora.rank")):
        raise SameMeaning("no adapters without a rank")
    return float(value)


def verl_lora_layers(value: Any, theirs: Theirs) -> list[str]:
    """Returns the adapted layers."""
    if value in ("all-linear", ["all-linear"]):
        raise SameMeaning("learner.lora.target_modules: all linear layers but the head")
    return verl_list(value, theirs)


def verl_warmup_steps(value: Any, theirs: Theirs) -> int:
    """Returns the steps of the warm-up; verl's -1 leaves them to the ratio."""
    if value < 0 and theirs.get(ACTOR + "optim.lr_warmup_steps_ratio"):
        raise SameMeaning("lr_warmup_steps_ratio counts")
    return max(0, int(value))


def verl_optimizer(value: Any, _: Theirs) -> str:
    """Returns the optimizer."""
    if value not in OPTIMIZERS:
        raise NoCounterpart("optimizer.name has adamw, muon, sgd, adafactor, or file.py:name")
    return OPTIMIZERS[value]


def verl_betas(value: Any, theirs: Theirs) -> Several:
    """Returns the betas of AdamW."""
    if OPTIMIZERS.get(theirs.get(ACTOR + "optim.optimizer"), "adamw") != "adamw":
        raise SameMeaning("of no effect without AdamW")
    return Several({"optimizer.betas": value})
