"""The conversions of verl's values: batches, algorithm, rewards, engines and machines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from agentgym.cli.foreign.keys import Converter, MissingPart, NoCounterpart, SameMeaning, Several, Theirs
from agentgym.data import DataConfig, open_data
from agentgym.errors import AgentGymError

__all__ = [
    *("ACTOR", "ROLLOUT"),
    *("verl_list", "verl_epochs", "verl_eval_temperature", "verl_home_path"),
    *("verl_interval", "verl_is_multi_turn", "verl_logger", "verl_micro_tokens", "verl_minibatches"),
    *("verl_neutral", "verl_off_if", "verl_overlong", "verl_positive", "verl_prompt_limit"),
    *("verl_reply_limit", "verl_reward_function", "verl_reward_manager", "verl_sample_size", "verl_save_interval"),
    *("verl_steps", "verl_validation"),
]

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SCORERS: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo", "math"), "math"
    ),
}
"""The scorers of rows by verl's `data_source`."""
TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio")


def verl_list(value: Any, _: Theirs) -> list[str]:
    """Returns a list of texts, with the home folder in place of `~`; verl takes one value or a list."""
    return [os.path.expanduser(str(item)) for item in (value if isinstance(value, list) else [value])]


def verl_home_path(value: Any, _: Theirs) -> str:
    """Returns a path with the home folder in place of `~`."""
    return os.path.expanduser(str(value))


def verl_positive(value: Any, _: Theirs) -> Any:
    """Returns a number, or None for 0 and below: verl's -1 is no limit."""
    return value if value > 0 else None


def verl_neutral(value: Any, reason: str) -> Converter:
    """Returns a conversion that raises SameMeaning for `value`, which has no effect, and NoCounterpart for others."""

    def convert(setting: Any, _: Theirs) -> Any:
        if setting == value:
            raise SameMeaning(f"{value} has no effect")
        raise NoCounterpart(reason)

    return convert


def verl_off_if(off: Any, ours: Any, reason: str) -> Converter:
    """Returns a conversion that raises SameMeaning for the value `off`, and gives `ours` for any other."""

    def convert(setting: Any, _: Theirs) -> Any:
        if setting == off:
            raise SameMeaning(reason)
        return ours

    return convert


def verl_minibatches(value: Any, theirs: Theirs) -> Any:
    """Returns the number of minibatches of a step; verl's setting is the number of prompts in a minibatch."""
    tasks = theirs.get("data.train_batch_size")
    if tasks % value:
        raise NoCounterpart(f"{tasks} tasks a step are no multiple of a minibatch of {value}: set learner.minibatches")
    return max(1, tasks // value)


def verl_prompt_limit(value: Any, theirs: Theirs) -> Any:
    """Returns the most tokens of a prompt; raises NoCounterpart if verl cuts longer ones, which are left out here."""
    cut = theirs.get("data.truncation", "error")
    if cut != "error" and not theirs.get("data.filter_overlong_prompts", False):
        raise NoCounterpart(f"prompts are never cut (truncation={cut}): data.max_prompt_tokens leaves longer ones out")
    return value


def verl_is_multi_turn(theirs: Theirs) -> bool:
    """Returns True if an episode has several replies."""
    return bool(theirs.get(ROLLOUT + "multi_turn.enable") or verl_tool_files(None, theirs))


def verl_tool_files(_: Any, theirs: Theirs) -> list[str]:
    """Returns the configuration files of tools and of interactions."""
    names = (f"{ROLLOUT}multi_turn.{kind}_config_path" for kind in ("tool", "interaction"))
    return [path for name in names if theirs.get(name) for path in verl_list(theirs.get(name), theirs)]


def verl_turn_limit(_: Any, theirs: Theirs) -> Several:
    """Returns the most replies of an episode: verl's limit of replies, or one more than that of answers, if lower."""
    replies = theirs.get(ROLLOUT + "multi_turn.max_assistant_turns")
    answers = theirs.get(ROLLOUT + "multi_turn.max_user_turns")
    limit = min(bound for bound in (replies, None if answers is None else answers + 1) if bound is not None)
    return Several({"env_kwargs.max_turns" if verl_tool_files(None, theirs) else "limits.max_turns": limit})


def verl_reply_limit(value: Any, theirs: Theirs) -> Several:
    """Returns the most tokens of a reply and, with several replies, of the trajectory, as verl limits all of them."""
    limits = {"limits.turn_tokens": value}
    if verl_is_multi_turn(theirs):
        limits["limits.trajectory_tokens"] = value + theirs.get("data.max_prompt_length")
    return Several(limits)


def verl_steps(value: Any, theirs: Theirs) -> Several:
    """Returns the number of steps, and no epochs: steps take precedence."""
    return Several({"steps": value, "epochs": None})


def verl_micro_tokens(value: Any, theirs: Theirs) -> int:
    """Returns the tokens of a micro-batch of `value` rows, each of the greatest length."""
    return int(value) * int(theirs.get("data.max_prompt_length") + theirs.get("data.max_response_length"))


def verl_eval_temperature(value: Any, theirs: Theirs) -> Any:
    """Returns the temperature of evaluations: 0, as verl's are greedy, unless do_sample is set."""
    return value if theirs.get(ROLLOUT + "val_kwargs.do_sample") else 0.0


def verl_validation(value: Any, theirs: Theirs) -> Several:
    """Returns the files of held-out tasks, or no held-out episodes without files."""
    files = verl_list(value, theirs) if value else []
    return Several({"data.eval": files} if files else {"eval.episodes": 0})


def verl_interval(value: Any, theirs: Theirs) -> Any:
    """Returns the steps between evaluations; with -1, verl evaluates only before and after training."""
    if value < 1:
        raise SameMeaning("eval.every: 0")
    if not theirs.get("data.val_files"):
        raise NoCounterpart("there are no val_files")
    return value


def verl_save_interval(value: Any, _: Theirs) -> Any:
    """Returns the steps between checkpoints; with -1, verl writes none, and the default of checkpoint.every is kept."""
    if value < 1:
        raise SameMeaning("checkpoint.every: 20, and the last step always writes a checkpoint")
    return value


def verl_logger(value: Any, theirs: Theirs) -> Several:
    """Returns the trackers; `console` and `file` need none, as the console and metrics.jsonl are always written."""
    names = verl_list(value, theirs)
    trackers = [name for name in names if name in TRACKERS]
    unknown = [name for name in names if name not in (*TRACKERS, "console", "file")]
    if unknown and not trackers:
        raise NoCounterpart(f"trackers are {', '.join(TRACKERS)}, or your own as file.py:Tracker")
    return Several({"trackers": trackers})


def verl_reward_function(value: Any, theirs: Theirs) -> str:
    """Returns the reward function as FILE:NAME, or the scorer of the data_source of the first row."""
    if value:
        return f"{value}:{theirs.get('custom_reward_function.name', 'compute_score')}"
    if theirs.get("reward_model.enable"):
        raise SameMeaning("reward.model.folder")
    source = _data_source(verl_list(theirs.get("data.train_files"), theirs))
    if source is None or source not in SCORERS:
        source_text = f", here {source!r}" if source else ""
        raise MissingPart(f"verl scores by the column data_source{source_text}: set reward.function (docs/rewards.md)")
    return SCORERS[source]


def _data_source(files: list[str]) -> str | None:
    """Returns the data_source of the first row, or None if the file cannot be read or has none."""
    try:
        rows = open_data(DataConfig(train=tuple(files[:1]), max_rows=1))
    except (AgentGymError, OSError):
        return None
    source = rows.train[0].options.get("data_source") if rows.train else None
    return str(source) if source else None


def verl_epochs(value: Any, theirs: Theirs) -> Any:
    """Returns the passes over the data; raises SameMeaning if total_training_steps is set, which takes precedence."""
    # If a script computes train_files, the translation has no data.train that epochs could pass over.
    if theirs.get("data.train_files") != theirs.given.get("data.train_files", theirs.get("data.train_files")):
        raise NoCounterpart("epochs are passes over data.train, which has no files here: set both")
    if theirs.get("trainer.total_training_steps"):
        raise SameMeaning("total_training_steps takes precedence")
    return value


def verl_sample_size(value: Any, _: Theirs) -> Several:
    """Returns the number of episodes that trackers receive."""
    return Several({"tracking.episodes": value} if value else {"tracking.episodes_every": 0})


def verl_reward_manager(value: Any, theirs: Theirs) -> Any:
    """Returns the reward settings for a reward manager; raises SameMeaning for one whose work a plain function does."""
    if value in ("naive", "dapo", "batch"):
        raise SameMeaning("the parameters of the reward function decide whether it takes an episode or a batch")
    if value == "prime":
        return Several({"reward.manner": "pool"})
    raise NoCounterpart("write it as a reward function of (trajectories, tasks): docs/rewards.md")


def verl_overlong(value: Any, theirs: Theirs) -> Several:
    """Returns the settings of DAPO's soft overlong punishment."""
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
