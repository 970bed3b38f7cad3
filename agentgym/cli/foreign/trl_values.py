"""The conversions of TRL's values: batches, losses, rewards and data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentgym.cli.foreign.keys import Converter, NoCounterpart, SameMeaning, Several, Theirs

__all__ = [
    *("trl_advantage", "trl_batch", "trl_betas", "trl_correction", "trl_dataset_name", "trl_dtype"),
    *("trl_engine", "trl_epochs", "trl_generation_batch", "trl_interval", "trl_kl"),
    *("trl_leave_device", "trl_lora_layers", "trl_lora_rank", "trl_loss", "trl_max_turns"),
    *("trl_model", "trl_optimizer", "trl_rewards", "trl_schedule", "trl_steps", "trl_stop"),
    *("trl_tools", "trl_trackers", "trl_train_data", "trl_uncut", "trl_updates"),
    *("trl_warmup", "trl_weight_decay", "trl_with_vllm"),
]

LOSS_TYPES: Mapping[str, tuple[str, str]] = {
    "grpo": ("ppo_clip", "seq-mean-token-mean"),
    "bnpo": ("ppo_clip", "token-mean"),
    "dapo": ("ppo_clip", "token-mean"),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "luspo": ("gspo", "seq-mean-token-sum"),
}
"""TRL's `loss_type`, and our loss and aggregation."""
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    "adafactor": "adafactor",
    "sgd": "sgd",
}
TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio")
PROCESSES = "num_processes"
"""The processes of `accelerate launch`, which no file has: an override."""


def trl_generation_batch(theirs: Theirs) -> int:
    """Returns the episodes of a generation."""
    if size := theirs.get("generation_batch_size"):
        return int(size)
    rows = int(theirs.get("per_device_train_batch_size")) * int(theirs.get(PROCESSES, 1))
    return rows * int(theirs.get("steps_per_generation") or theirs.get("gradient_accumulation_steps"))


def trl_updates(theirs: Theirs) -> int:
    """Returns the optimizer steps on one pass over the episodes of a generation."""
    rows = int(theirs.get("per_device_train_batch_size")) * int(theirs.get(PROCESSES, 1))
    return max(1, trl_generation_batch(theirs) // (rows * int(theirs.get("gradient_accumulation_steps"))))


def trl_batch(_: Any, theirs: Theirs) -> Several:
    """Returns the tasks of a step, and the minibatches that its episodes are learned in."""
    group, episodes = int(theirs.get("num_generations")), trl_generation_batch(theirs)
    if episodes % group:
        raise NoCounterpart(
            f"{episodes} episodes of a generation are no multiple of num_generations {group}: set tasks"
        )
    return Several({"tasks": episodes // group, "learner.minibatches": trl_updates(theirs)})


def trl_steps(value: Any, theirs: Theirs) -> Several:
    """Returns the steps: TRL counts optimizer steps, and they win over epochs."""
    if value < 1:
        raise SameMeaning("num_train_epochs counts")
    per_step = trl_updates(theirs) * int(theirs.get("num_iterations"))
    return Several({"steps": max(1, -(-value // per_step)), "epochs": None})


def trl_epochs(value: Any, theirs: Theirs) -> Any:
    """Returns the passes over the data."""
    if theirs.get("max_steps", -1) > 0:
        raise SameMeaning("max_steps counts")
    if not any(isinstance(theirs.get(name), str | list) for name in ("train_dataset", "dataset_name")):
        raise NoCounterpart("epochs are passes over data.train, which has no files here: set both")
    return value


def trl_model(value: Any, _: Theirs) -> str:
    """Returns a model's folder or id."""
    return str(value)


def trl_train_data(value: Any, _: Theirs) -> list[str]:
    """Returns the files to train on."""
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def trl_dataset_name(value: Any, theirs: Theirs) -> list[str]:
    """Returns a data set of the hub."""
    parts = [value, theirs.get("dataset_config"), theirs.get("dataset_train_split", "train")]
    return [":".join(str(part) for part in parts if part)]


def trl_rewards(value: Any, theirs: Theirs) -> Any:
    """Returns the places of the reward functions with their weights, and the environment's own where it has one."""
    functions = value if isinstance(value, list) else [value]
    if any(":" not in str(function) for function in functions):
        raise NoCounterpart("a model that scores is reward.model.folder; a function has a place, file.py:name")
    weights = theirs.get("reward_weights") or [1.0] * len(functions)
    if len(weights) != len(functions):
        raise NoCounterpart(f"{len(functions)} functions with {len(weights)} reward_weights")
    rewards = [
        str(function) + ("" if weight == 1.0 else f"={weight:g}")
        for function, weight in zip(functions, weights, strict=True)
    ]
    if theirs.get("environment_factory"):
        rewards.insert(0, "environment")
    return rewards[0] if len(rewards) == 1 and "=" not in rewards[0] else rewards


def trl_tools(value: Any, _: Theirs) -> list[str]:
    """Returns the places of functions, or of an environment."""
    if isinstance(value, dict):
        raise NoCounterpart("several environments: practice.mix, or data.agents by the rows' agent_name")
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def trl_stop(value: Any, _: Theirs) -> list[str]:
    """Returns the stop strings among the arguments of generation."""
    if not value:
        raise SameMeaning("off, as here")
    stop = value.get("stop") or value.get("stop_strings")
    if others := [name for name in value if name not in ("stop", "stop_strings")]:
        stop_hint = f"; sampling.stop: {stop}" if stop else ""
        raise NoCounterpart(f"no setting for {', '.join(others)}: see sampling, engine, server.server_args{stop_hint}")
    return [stop] if isinstance(stop, str) else [*stop]


def trl_max_turns(value: Any, theirs: Theirs) -> int:
    """Returns the most replies of an episode, the last of which has no call."""
    if not (theirs.given.get("tools") or theirs.given.get("environment_factory")):
        raise SameMeaning("of no effect without tools")
    return int(value) + 1


def trl_advantage(value: Any, theirs: Theirs) -> Several:
    """Returns the estimator, with the 1e-4 that TRL adds to the deviation."""
    if theirs.get("multi_objective_aggregation") == "normalize_then_sum":
        raise NoCounterpart("algo gdpo compares each component of the reward with its group, and whitens by tokens")
    if value in (True, "group"):
        return Several({"algo": "grpo", "advantage.settings.epsilon": 1e-4})
    if value in (False, "none"):
        return Several({"algo": "dr_grpo"})
    raise NoCounterpart("algo reinforce_plus_plus_baseline whitens over the tokens of the batch")


def trl_loss(value: Any, theirs: Theirs) -> Several:
    """Returns the loss with its bounds, and the aggregation."""
    if value not in LOSS_TYPES:
        raise NoCounterpart("no loss of this name: `agentgym algorithms list`, or your own as file.py:name")
    name, aggregation = LOSS_TYPES[value]
    low = theirs.get("epsilon")
    high = theirs.get("epsilon_high", low)
    settings: dict[str, Any] = {"clip_low": low, "clip_high": high}
    if theirs.get("importance_sampling_level") == "sequence" and name == "ppo_clip":
        name = "gspo"
    if name == "ppo_clip":
        settings["dual_clip"] = theirs.get("delta")
    elif name == "cispo":
        settings = {"clip_low": 1.0, "clip_high": max(0.0, high - 1.0)}  # TRL's bound is of the ratio itself
    elif name == "sapo":
        settings = {
            "tau_positive": theirs.get("sapo_temperature_pos", 1.0),
            "tau_negative": theirs.get("sapo_temperature_neg", 1.05),
        }
    outcome = Several({"learner.loss": name, "aggregation": aggregation})
    outcome |= {f"learner.loss_settings.{key}": item for key, item in settings.items()}
    if aggregation == "seq-mean-token-sum-norm":
        outcome["norm_tokens"] = theirs.get("max_completion_length")
    return outcome


def trl_schedule(value: Any, theirs: Theirs) -> Several:
    """Returns the decay of the learning rate; TRL's linear one begins at once."""
    if value == "linear":
        return Several({"optimizer.decay": "linear", "optimizer.decay_settings.flat": 0.0})
    if value in ("constant", "constant_with_warmup"):
        return Several({"optimizer.decay": "constant"})
    if value == "cosine":
        return Several({"optimizer.decay": "cosine"})
    if value == "cosine_with_min_lr":
        floor = (theirs.get("lr_scheduler_kwargs") or {}).get("min_lr_rate", 0.0)
        return Several({"optimizer.decay": "cosine", "optimizer.decay_settings.floor": floor})
    raise NoCounterpart("optimizer.decay is constant, linear or cosine, or your own as file.py:name")


def trl_warmup(value: Any, theirs: Theirs) -> int:
    """Returns the steps of the warm-up; a share below 1 is one of max_steps."""
    if 0 < value < 1:
        total = theirs.get("max_steps", -1)
        if total < 1:
            raise NoCounterpart("a share of steps that follow from the data: set optimizer.warmup_steps")
        return -int(-value * total // 1)
    return int(value)


def trl_optimizer(value: Any, _: Theirs) -> str:
    """Returns the optimizer."""
    if value not in OPTIMIZERS:
        raise NoCounterpart("optimizer.name has adamw, muon, sgd, adafactor, or file.py:name")
    return OPTIMIZERS[value]


def trl_betas(value: Any, theirs: Theirs) -> list[float]:
    """Returns both betas of AdamW."""
    if OPTIMIZERS.get(theirs.get("optim"), "adamw") != "adamw":
        raise SameMeaning("of no effect without AdamW")
    return [theirs.get("adam_beta1"), theirs.get("adam_beta2")]


def trl_weight_decay(value: Any, theirs: Theirs) -> Several:
    """Returns the weight decay, and none of norms and biases; adapters have neither."""
    has_adapters = any(theirs.get(name) for name in ("use_peft", "lora_r", "peft_config.r"))
    own = {} if has_adapters or not value else {"optimizer.weight_decays": {"norm|bias": 0.0}}
    return Several({"optimizer.weight_decay": value, **own})


def trl_uncut(off: float) -> Converter:
    """Returns a conversion that refuses to cut the distribution that is sampled from."""
    reason = "the trainer's logprobs are those of the whole distribution"

    def convert(value: Any, _: Theirs) -> Any:
        raise (SameMeaning if value == off else NoCounterpart)(reason)

    return convert


def trl_leave_device() -> str:
    """Says that the device is to be set."""
    raise SameMeaning("learner.device: cpu; set it to cuda on a machine with a GPU")


def trl_kl(value: Any, theirs: Theirs) -> float:
    """Returns the weight of the KL term."""
    return float(value)


def trl_engine(value: Any, _: Theirs) -> Several:
    """Returns the engine that samples."""
    return Several({"engine": "vllm" if value else "local"})


def trl_with_vllm(option: str) -> Converter:
    """Returns a conversion to an option of vLLM's own command line."""

    def convert(value: Any, theirs: Theirs) -> Several:
        if not theirs.get("use_vllm"):
            raise SameMeaning("of no effect without use_vllm")
        if value == 1 and "parallel" in option:
            raise SameMeaning("one GPU for each server")
        return Several({"server.server_args": [option, str(value)]})

    return convert


def trl_correction(value: Any, theirs: Theirs) -> Several:
    """Returns the weights for the difference between vLLM and the trainer."""
    if not theirs.get("use_vllm"):
        raise SameMeaning("of no effect without use_vllm")
    if not value:
        raise SameMeaning("learner.correction: null")
    mode = theirs.get("vllm_importance_sampling_mode")
    names = {
        f"{level}_{kind}": f"{ours}_{level}"
        for level in ("token", "sequence")
        for kind, ours in (("truncate", "tis"), ("mask", "mis"))
    }
    cap = theirs.get("vllm_importance_sampling_clip_max")
    if theirs.get("vllm_importance_sampling_clip_min") is not None or mode not in names:
        raise NoCounterpart(
            "learner.correction: tis_token, tis_sequence, mis_token, mis_sequence have a cap alone, icepop both bounds"
        )
    return Several({"learner.correction": names[mode], "learner.correction_settings.cap": cap})


def trl_interval(on: str, name: str) -> Converter:
    """Returns a conversion of an interval that a strategy switches on."""

    def convert(value: Any, theirs: Theirs) -> Any:
        if theirs.get(on, "steps" if on == "save_strategy" else "no") != "steps":
            raise SameMeaning(f"{on} is not steps")
        if not value or value < 1:
            raise NoCounterpart(f"a share of the steps: set {name}")
        return int(value)

    return convert


def trl_trackers(value: Any, _: Theirs) -> list[str]:
    """Returns the trackers."""
    names = value if isinstance(value, list) else [value]
    trackers = [name for name in names if name in TRACKERS]
    if not trackers and any(name not in ("none", None) for name in names):
        raise NoCounterpart(f"trackers are {', '.join(TRACKERS)}, or your own as file.py:Tracker")
    return trackers


def trl_dtype(value: Any, _: Theirs) -> str:
    """Returns the type of the weights and the passes."""
    return "bfloat16" if value else "float32"


def trl_lora_layers(value: Any, _: Theirs) -> list[str]:
    """Returns the adapted layers."""
    if value == "all-linear":
        raise SameMeaning("learner.lora.target_modules: all linear layers but the head")
    return value if isinstance(value, list) else [str(value)]


def trl_lora_rank(value: Any, theirs: Theirs) -> Several:
    """Returns the rank of adapters, which learn at learning_rate in TRL."""
    return Several({"learner.lora.rank": value, "learner.lora.learning_rate": theirs.get("learning_rate")})
