"""The conversions of verl's values: batches, algorithm, rewards, engines and machines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from agentgym.cli.foreign.keys import Converter, MissingPart, NoCounterpart, SameMeaning, Several, Theirs
from agentgym.data import DataConfig, open_data
from agentgym.errors import AgentGymError

__all__ = ["ACTOR", "ROLLOUT"]

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
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
CLIPPED = ("vanilla", "clip_cov", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
"""The losses with a bound on each side."""
ESTIMATORS: Mapping[str, str] = {
    **{
        name: name
        for name in (
            *("gae", "grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk", "gdpo"),
            *("reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"),
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
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
SEQUENCE_LOSSES = ("gspo", "sapo")
"""The losses that verl always aggregates by seq-mean-token-mean."""
DECAYS: Mapping[str, str] = {"constant": "constant", "cosine": "cosine"}
SCORERS: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo", "math"), "math"
    ),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code"),
}
"""The scorers of rows by verl's `data_source`."""
TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio")
SERVERS = ("vllm", "sglang")
ENGINE_ARGS: Mapping[str, Mapping[str, str]] = {
    "gpu_memory_utilization": {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"},
    "tensor_model_parallel_size": {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"},
    "max_num_seqs": {"vllm": "--max-num-seqs", "sglang": "--max-running-requests"},
    "max_num_batched_tokens": {"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size"},
    "enforce_eager": {"vllm": "--enforce-eager", "sglang": "--disable-cuda-graph"},
}
"""Keys of the rollout that are options of the servers' own command lines."""


def constant(value: Any, reason: str) -> Converter:
    """Returns a conversion that gives the same value whatever theirs is, if theirs is true."""

    def convert(given: Any, _: Theirs) -> Any:
        if not given:
            raise SameMeaning(reason)
        return value

    return convert


def all_of(value: Any, _: Theirs) -> list[str]:
    """Returns one file or several as a list."""
    return [os.path.expanduser(str(item)) for item in (value if isinstance(value, list) else [value])]


def home_path(value: Any, _: Theirs) -> str:
    """Returns a path with the user's folder in place of `~`."""
    return os.path.expanduser(str(value))


def positive(value: Any, _: Theirs) -> Any:
    """Returns a number, or None for verl's -1."""
    return value if value > 0 else None


def neutral(value: Any, reason: str) -> Converter:
    """Returns a conversion that raises NoCounterpart for any other value than the one that has no effect."""

    def convert(given: Any, _: Theirs) -> Any:
        if given == value:
            raise SameMeaning(f"{value} has no effect")
        raise NoCounterpart(reason)

    return convert


def off_if(off: Any, ours: Any, reason: str) -> Converter:
    """Returns a conversion of a switch: `ours` where it is on, else what our default does."""

    def convert(given: Any, _: Theirs) -> Any:
        if given == off:
            raise SameMeaning(reason)
        return ours

    return convert


def minibatches(value: Any, theirs: Theirs) -> Any:
    """Returns the number of minibatches; verl counts the prompts of one."""
    tasks = theirs.get("data.train_batch_size")
    if tasks % value:
        raise NoCounterpart(f"{tasks} tasks a step are not split evenly by {value}: set learner.minibatches")
    return max(1, tasks // value)


def prompt_limit(value: Any, theirs: Theirs) -> Any:
    """Returns the longest prompt: rows beyond it are left out, and nothing is cut."""
    cut = theirs.get("data.truncation", "error")
    if cut != "error" and not theirs.get("data.filter_overlong_prompts", False):
        raise NoCounterpart(f"prompts are never cut (truncation={cut}): data.max_prompt_tokens leaves longer ones out")
    return value


def is_multi_turn(theirs: Theirs) -> bool:
    """Returns True if an episode has several replies."""
    return bool(theirs.get(ROLLOUT + "multi_turn.enable") or theirs.get(ROLLOUT + "multi_turn.tool_config_path"))


def reply_limit(value: Any, theirs: Theirs) -> Several:
    """Returns the limits of a reply, and of a conversation of several."""
    limits = {"limits.turn_tokens": value}
    if is_multi_turn(theirs):
        limits["limits.trajectory_tokens"] = value + theirs.get("data.max_prompt_length")
    return Several(limits)


def steps(value: Any, theirs: Theirs) -> Several:
    """Returns the steps, which win over epochs."""
    return Several({"steps": value, "epochs": None})


def advantage(value: Any, theirs: Theirs) -> Several:
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


def loss(value: Any, theirs: Theirs) -> Several:
    """Returns the policy loss with its settings."""
    if value not in LOSSES:
        raise NoCounterpart("no loss of this name: `agentgym algorithms list`, or your own as file.py:name")
    settings = {name: theirs.get(ACTOR + key, default) for name, (key, default) in LOSS_SETTINGS.get(value, {}).items()}
    if value in CLIPPED:
        for name in ("low", "high"):
            bound = theirs.get(f"{ACTOR}clip_ratio_{name}", theirs.get(ACTOR + "clip_ratio", 0.2))
            settings[f"clip_{name}"] = bound
    return Several(
        {"learner.loss": LOSSES[value], **{f"learner.loss_settings.{key}": item for key, item in settings.items()}}
    )


def aggregation(value: Any, theirs: Theirs) -> Several:
    """Returns the aggregation with its constant."""
    mode = theirs.get(ACTOR + "policy_loss.loss_mode")
    name = "seq-mean-token-mean" if mode in SEQUENCE_LOSSES else value
    if name not in AGGREGATIONS:
        raise NoCounterpart("no aggregation of this name: `agentgym algorithms list`, or your own as file.py:name")
    found = Several({"aggregation": name})
    if name == "seq-mean-token-sum-norm" and (tokens := theirs.get(ACTOR + "loss_scale_factor")):
        found["norm_tokens"] = int(tokens)
    return found


def _penalty(value: Any) -> str:
    if value not in KL_NAMES:
        raise NoCounterpart(f"no KL penalty {value!r}: `agentgym algorithms list`")
    return KL_NAMES[value]


def kl_in_loss(value: Any, theirs: Theirs) -> Several:
    """Returns the KL term of the loss."""
    if not value:
        raise SameMeaning("learner.kl.coefficient: 0")
    kind = theirs.get(ACTOR + "kl_loss_type", "low_var_kl")
    coefficient = theirs.get(ACTOR + "kl_loss_coef", 0.001)
    return Several({"learner.kl.coefficient": coefficient, "learner.kl.penalty": _penalty(kind)})


def kl_in_reward(value: Any, theirs: Theirs) -> Several:
    """Returns the KL penalty of the reward, with its controller."""
    if not value:
        raise SameMeaning("learner.kl.coefficient: 0")
    if theirs.get(ACTOR + "use_kl_loss"):
        raise NoCounterpart("a run has one KL term, in the loss or in the reward; that of the loss was taken")
    control = "algorithm.kl_ctrl."
    found = Several(
        {
            "learner.kl.place": "reward",
            "learner.kl.coefficient": theirs.get(control + "kl_coef", 0.001),
            "learner.kl.penalty": _penalty(theirs.get("algorithm.kl_penalty", "kl")),
        }
    )
    if theirs.get(control + "type", "fixed") == "adaptive":
        found["learner.kl.target"] = theirs.get(control + "target_kl", 0.1)
        found["learner.kl.horizon"] = theirs.get(control + "horizon", 10000)
    return found


def correction(value: Any, theirs: Theirs) -> Several:
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


def schedule(value: Any, theirs: Theirs) -> Several:
    """Returns the decay of the learning rate."""
    if value not in DECAYS:
        raise NoCounterpart("optimizer.decay is constant, linear or cosine, or your own as file.py:name")
    found = Several({"optimizer.decay": DECAYS[value]})
    if value == "cosine" and (floor := theirs.get(ACTOR + "optim.min_lr_ratio")):
        found["optimizer.decay_settings.floor"] = floor
    return found


def warmup(value: Any, theirs: Theirs) -> int:
    """Returns the steps of the warm-up, from a share of the steps."""
    total = theirs.get("trainer.total_training_steps")
    if not value:
        raise SameMeaning("optimizer.warmup_steps: 0")
    if theirs.get(ACTOR + "optim.lr_warmup_steps", -1) > 0:
        raise SameMeaning("lr_warmup_steps was taken")
    if not total:
        raise NoCounterpart("a share of steps that follow from the data: set optimizer.warmup_steps")
    return int(value * total)


def critic_of(convert: Converter | None = None) -> Converter:
    """Returns a conversion of a critic's key, which counts where there is a critic (gae)."""

    def converted(value: Any, theirs: Theirs) -> Any:
        if theirs.get("algorithm.adv_estimator") != "gae":
            raise SameMeaning("no critic without adv_estimator=gae")
        return value if convert is None else convert(value, theirs)

    return converted


def lora_rank(value: Any, theirs: Theirs) -> Several:
    """Returns the rank of adapters, which learn at the same rate as weights do in verl."""
    if not value:
        raise SameMeaning("learner.lora.rank: 0")
    return Several({"learner.lora.rank": value, "learner.lora.learning_rate": theirs.get(ACTOR + "optim.lr")})


def lora_alpha(value: Any, theirs: Theirs) -> float:
    """Returns the scale of adapters."""
    if not any(theirs.get(f"actor_rollout_ref.model.{name}") for name in ("lora_rank", "lora.rank")):
        raise SameMeaning("no adapters without a rank")
    return float(value)


def lora_layers(value: Any, theirs: Theirs) -> list[str]:
    """Returns the adapted layers."""
    if value in ("all-linear", ["all-linear"]):
        raise SameMeaning("learner.lora.target_modules: all linear layers but the head")
    return all_of(value, theirs)


def micro_tokens(value: Any, theirs: Theirs) -> int:
    """Returns the tokens of a forward pass, from rows of the greatest length."""
    return int(value) * int(theirs.get("data.max_prompt_length") + theirs.get("data.max_response_length"))


def engine_arg(key: str) -> Converter:
    """Returns a conversion to an option of the server's own command line."""

    def convert(value: Any, theirs: Theirs) -> Several:
        engine = theirs.get(ROLLOUT + "name")
        if engine not in SERVERS:
            raise SameMeaning("of no effect on the engine local")
        option = ENGINE_ARGS[key][engine]
        if value is False:
            raise SameMeaning(f"the server's default, without {option}")
        if key == "tensor_model_parallel_size":
            value = split_gpus(theirs)[2]
            if value == 1:
                raise SameMeaning("one GPU for each server")
        return Several({f"{engine}.server_args": [option] if value is True else [option, str(value)]})

    return convert


def eval_temperature(value: Any, theirs: Theirs) -> Any:
    """Returns the temperature of evaluations; verl's are greedy unless do_sample is set."""
    return value if theirs.get(ROLLOUT + "val_kwargs.do_sample") else 0.0


def validation(value: Any, theirs: Theirs) -> Several:
    """Returns the files to evaluate on; without any, nothing is evaluated."""
    files = all_of(value, theirs) if value else []
    return Several({"data.eval": files} if files else {"eval.episodes": 0})


def interval(value: Any, theirs: Theirs) -> Any:
    """Returns the steps between evaluations; verl's -1 has none during training."""
    if value < 1:
        raise SameMeaning("eval.every: 0")
    if not theirs.get("data.val_files"):
        raise NoCounterpart("there are no val_files")
    return value


def save_interval(value: Any, _: Theirs) -> Any:
    """Returns the steps between checkpoints; verl's -1 writes none."""
    if value < 1:
        raise SameMeaning("the last step always writes a checkpoint, and every 20th one")
    return value


def logger(value: Any, theirs: Theirs) -> Several:
    """Returns the trackers; the console and metrics.jsonl are always written."""
    names = all_of(value, theirs)
    known = [name for name in names if name in TRACKERS]
    unknown = [name for name in names if name not in (*TRACKERS, "console", "file")]
    if unknown and not known:
        raise NoCounterpart(f"trackers are {', '.join(TRACKERS)}, or your own as file.py:Tracker")
    return Several({"trackers": known})


def reward_function(value: Any, theirs: Theirs) -> str:
    """Returns the place of a reward function, or the scorer of the rows' data_source."""
    if value:
        return f"{value}:{theirs.get('custom_reward_function.name', 'compute_score')}"
    if theirs.get("reward_model.enable"):
        raise SameMeaning("reward.model.folder")
    source = _data_source(all_of(theirs.get("data.train_files"), theirs))
    if source is None or source not in SCORERS:
        found = f", here {source!r}" if source else ""
        raise MissingPart(f"verl scores by the column data_source{found}: set reward.function (docs/rewards.md)")
    return SCORERS[source]


def _data_source(files: list[str]) -> str | None:
    """Returns the data_source of the first row, if there is a file to read."""
    try:
        rows = open_data(DataConfig(train=tuple(files[:1]), max_rows=1))
    except (AgentGymError, OSError):
        return None
    source = rows.train[0].options.get("data_source") if rows.train else None
    return str(source) if source else None


def epochs(value: Any, theirs: Theirs) -> Any:
    """Returns the passes over the data, unless the steps are given."""
    if theirs.get("data.train_files") != theirs.given.get("data.train_files", theirs.get("data.train_files")):
        raise NoCounterpart("passes over the rows of files: add epochs, with data.train")
    if theirs.get("trainer.total_training_steps"):
        raise SameMeaning("total_training_steps wins")
    return value


def warmup_steps(value: Any, theirs: Theirs) -> int:
    """Returns the steps of the warm-up; verl's -1 leaves them to the ratio."""
    if value < 0 and theirs.get(ACTOR + "optim.lr_warmup_steps_ratio"):
        raise SameMeaning("lr_warmup_steps_ratio counts")
    return max(0, int(value))


def sample_size(value: Any, _: Theirs) -> Several:
    """Returns the number of episodes that trackers receive."""
    return Several({"tracking.episodes": value} if value else {"tracking.episodes_every": 0})


def reward_manager(value: Any, theirs: Theirs) -> Any:
    """Says how a reward manager's work is done: its function's signature decides."""
    if value in ("naive", "dapo", "batch"):
        raise SameMeaning("the function's parameters decide whether it takes an episode or a batch")
    if value == "prime":
        return Several({"reward.manner": "pool"})
    raise NoCounterpart("write it as a reward function of (trajectories, tasks): docs/rewards.md")


def overlong(value: Any, theirs: Theirs) -> Several:
    """Returns DAPO's soft punishment of long replies."""
    if not value:
        raise SameMeaning("reward.overlong.buffer_tokens: 0")
    for prefix in ("reward_model.overlong_buffer.", "reward_model.reward_kwargs.overlong_buffer_cfg."):
        if length := theirs.get(prefix + "len"):
            return Several(
                {
                    "reward.overlong.buffer_tokens": length,
                    "reward.overlong.max_tokens": theirs.get("data.max_response_length"),
                    "reward.overlong.penalty": float(theirs.get(prefix + "penalty_factor", 1.0)),
                }
            )
    raise NoCounterpart("overlong_buffer.len is missing")


def has_gpu() -> bool:
    """Returns True if this machine has an NVIDIA GPU."""
    return shutil.which("nvidia-smi") is not None


def device(value: Any, theirs: Theirs) -> Any:
    """Returns the device of a run in one process; on a cluster, GPUs are reserved instead."""
    if value == "cpu":
        return "cpu"
    if _num_gpus(theirs) > 1:
        raise SameMeaning("ray.gpus_per_learner: 1")
    if not has_gpu():
        raise NoCounterpart("this machine has no GPU, and learner.device stays cpu: set it to cuda where there is one")
    return value


def _num_gpus(theirs: Theirs) -> int:
    given = theirs.get("trainer.n_gpus_per_node", 1), theirs.get("trainer.nnodes", 1)
    return int(given[0]) * int(given[1])


def split_gpus(theirs: Theirs) -> tuple[int, int, int]:
    """Returns learner ranks, engines, and the GPUs of an engine: servers get half, since they share none with ranks."""
    total = _num_gpus(theirs)
    per_engine = min(int(theirs.get(ROLLOUT + "tensor_model_parallel_size", 1)), max(1, total // 2))
    engines = max(1, total // 2 // per_engine)
    return total - engines * per_engine, engines, per_engine


def machines(value: Any, theirs: Theirs) -> Several:
    """Returns the processes of a run on several GPUs."""
    total = _num_gpus(theirs)
    if total < 2:
        raise SameMeaning("executor: local, one process")
    if theirs.get("trainer.device") == "cpu":
        raise NoCounterpart("the processes of a cluster are GPUs in verl: set executor ray, ray.learners, ray.engines")
    if theirs.get(ROLLOUT + "name") not in SERVERS:
        found = {"ray.layout": "colocated", "ray.learners": total, "ray.engines": total, "ray.gpus_per_engine": 1.0}
    else:
        learners, engines, per_engine = split_gpus(theirs)
        found = {"ray.learners": learners, "ray.engines": engines, "ray.gpus_per_engine": float(per_engine)}
    return Several({"executor": "ray", "ray.gpus_per_learner": 1.0, **found})


def ranks_only(value: Any, theirs: Theirs) -> Any:
    """Returns a value that counts on several ranks."""
    if _num_gpus(theirs) < 2 or not value:
        raise SameMeaning("of no effect on one rank")
    return value


def parallel(value: Any, theirs: Theirs) -> Any:
    """Returns a number of ranks that share a forward pass."""
    learners = split_gpus(theirs)[0] if theirs.get(ROLLOUT + "name") in SERVERS else _num_gpus(theirs)
    if value > 1 and learners % value:
        raise NoCounterpart(f"the {learners} learner ranks are no multiple of {value}: set learner.mesh")
    return ranks_only(value if value > 1 else 0, theirs)


def tensor_parallel(value: Any, theirs: Theirs) -> Any:
    """Returns the ranks that split the weights of a layer, which adapters do not."""
    if any(theirs.get(f"actor_rollout_ref.model.{name}") for name in ("lora_rank", "lora.rank")):
        raise NoCounterpart("adapters are not split by learner.mesh.tensor")
    return parallel(value, theirs)


def engine(value: Any, _: Theirs) -> str:
    """Returns the engine that samples."""
    if value in ("hf", "naive"):
        return "local"
    if value not in SERVERS:
        raise NoCounterpart("engine is local, sglang or vllm, or your own as file.py:name")
    return str(value)
