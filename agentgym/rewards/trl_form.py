"""TRL's form of reward functions, `(prompts, completions, **columns)`, called once for the episodes of a step.

As in TRL's `GRPOTrainer`, all arguments are given by name, and each is a list with an entry for each episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from agentgym.openai_wire import message_to_openai
from agentgym.rewards.reply import conversation, opening
from agentgym.rewards.reward import InvalidReward
from agentgym.settings.functions import check_setting_names
from agentgym.trajectory import Source, Trajectory
from agentgym.types import JSON, Message

__all__ = ["call_trl_reward", "is_trl_reward", "trl_reward_with_settings"]

_OWN = ("prompts", "completions", "completion_ids")
_TRUTHS = ("ground_truth", "answer", "solution", "label")
"""The names of columns that stand for the ground truth of a task, if it has none of that name."""


def is_trl_reward(function: Callable[..., object]) -> bool:
    """Returns whether a function has TRL's form: it takes `completions`."""
    return "completions" in inspect.signature(function).parameters


def trl_reward_with_settings(
    name: str, function: Callable[..., object], settings: Mapping[str, object]
) -> Callable[..., object]:
    """Binds the settings of a function, any of its parameters but TRL's own; raises ConfigError for others."""
    parameters = inspect.signature(function).parameters
    setting_names = [parameter for parameter in parameters if parameter not in _OWN]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    check_setting_names(f"reward {name!r}", settings, setting_names, all_but=_OWN if open_ended else None)
    return partial(function, **settings)


def call_trl_reward(name: str, function: Callable[..., object], trajectories: Sequence[Trajectory]) -> object:
    """Returns the function's result for these episodes; raises InvalidReward for a column that their tasks lack.

    Prompts and completions are lists of messages, with the tools' answers among them. Columns are those of
    `task.options` and of its `extra_info`.
    """
    openings = [opening(trajectory) for trajectory in trajectories]
    further = [conversation(trajectory)[len(first) :] for trajectory, first in zip(trajectories, openings, strict=True)]
    arguments: dict[str, object] = {
        "prompts": [list(map(_message, messages)) for messages in openings],
        "completions": [list(map(_message, messages)) for messages in further],
        "completion_ids": [_completion_ids(trajectory) for trajectory in trajectories],
    }
    bound = set(function.keywords) if isinstance(function, partial) else set()
    columns = [_columns(trajectory.task.options) for trajectory in trajectories]
    shared = set.intersection(*map(set, columns)) if columns else set()
    arguments |= {column: [cells[column] for cells in columns] for column in shared - bound - set(arguments)}
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named_parameters = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    for parameter in named_parameters:
        if parameter.name not in arguments and parameter.default is parameter.empty:
            have = ", ".join(sorted(shared)) or "none"
            raise InvalidReward(f"reward {name!r} takes a column {parameter.name!r}, and the tasks have: {have}")
    parameter_names = {parameter.name for parameter in named_parameters}
    return function(**{key: value for key, value in arguments.items() if takes_all or key in parameter_names})


def _message(message: Message) -> dict[str, JSON]:
    """Returns the message with its content as text: functions of TRL look into it, and a call alone has None."""
    return {**message_to_openai(message), "content": message.content}


def _columns(options: Mapping[str, JSON]) -> dict[str, JSON]:
    """Returns the columns of a task by name, the ground truth under each of its usual names."""
    extra = options.get("extra_info")
    cells = {**(extra if isinstance(extra, Mapping) else {}), **options}
    cells.pop("messages", None)
    truth = cells.get("ground_truth")
    return {**({} if truth is None else dict.fromkeys(_TRUTHS, truth)), **cells}


def _completion_ids(trajectory: Trajectory) -> list[int]:
    """Returns the ids of the last row after its prompt."""
    spans = trajectory.rows[-1].spans if trajectory.rows else ()
    return [token for span in spans if span.source is not Source.PROMPT for token in span.ids]
