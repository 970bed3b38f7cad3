"""The forms of reward functions that users write, and the calls of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from agentgym.errors import ConfigError, nearest
from agentgym.loading import Wanted, is_code_path, load_named
from agentgym.rewards.registry import REWARDS
from agentgym.rewards.reply import ground_truth, whole_reply
from agentgym.rewards.reward import InvalidReward
from agentgym.rewards.trl_form import call_trl_reward, is_trl_reward, trl_reward_with_settings
from agentgym.settings.functions import check_setting_names, settings_of, with_settings
from agentgym.trajectory import Trajectory
from agentgym.types import JSON

__all__ = ["RewardCall", "RewardFunction", "find_reward"]

RewardFunction: TypeAlias = Callable[..., object]
"""Any of `(trajectory, task, environment)`, `(trajectories, tasks)`, verl's `(data_source, solution_str, ground_truth,
extra_info)` or `(data)`, or TRL's `(prompts, completions, **columns)`.

Sync or async; keyword-only parameters are settings. It returns a value for `read_reward`, or a sequence of those."""

REWARD_FUNCTION = Wanted(
    noun="reward function",
    hint="A reward function takes (trajectory, task): `agentgym docs rewards` has one.",
    new="`agentgym new reward NAME` writes a reward function to start from",
)
PARTS = ("trajectory", "task", "environment")
"""The parameters of a function of one episode: any of them, by name and in any order."""
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Form(StrEnum):
    """The parameters of a reward function."""

    EPISODE = "any of trajectory, task and environment"
    BATCH = "(trajectories, tasks)"
    VERL = "verl's (data_source, solution_str, ground_truth, extra_info)"
    VERL_BATCH = "verl's (data_sources, solution_strs, ground_truths, extra_infos)"
    VERL_DATA = "verl's (data)"
    TRL = "TRL's (prompts, completions, **columns)"


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function with its settings, called with trajectories whatever its own parameters are."""

    name: str
    function: RewardFunction
    form: Form
    parts: Mapping[str, str] = field(default_factory=dict)
    """The parts of the episode that a function of one episode takes, by the names of its parameters."""
    origin: tuple[str, Mapping[str, object]] | None = None
    """The name and the settings by which another process can load it; None for an object of this process."""

    @classmethod
    def of(
        cls, function: RewardFunction, settings: Mapping[str, object], *, name: str = "", batch: bool = False
    ) -> RewardCall:
        """Reads the function's signature; raises ConfigError for one that is not a reward, and for wrong settings."""
        origin = (name, dict(settings)) if name else None
        name = name or getattr(function, "__qualname__", type(function).__name__)
        if inspect.isclass(function):
            raise ConfigError(
                f"reward {name!r} is a function (trajectory, task), or an object of such a class, got "
                f"the class {function!r:.80}"
            )
        form = _form(name, function, batch)
        parts = _parts(name, function) if form is Form.EPISODE else {}
        own = {setting: default for setting, default in settings_of(function).items() if setting not in parts}
        missing = [setting for setting, default in own.items() if default is inspect.Parameter.empty]
        if missing := [setting for setting in missing if setting not in settings]:
            raise ConfigError(
                f"reward {name!r} needs the settings {', '.join(missing)}: reward.settings {missing[0]}=…"
            )
        return cls(name, _with_settings(name, function, settings, form), form, parts, origin)

    def __reduce__(self) -> tuple[object, ...]:
        if self.origin is None:
            raise ConfigError(
                f"reward {self.name!r} takes the environment, which env_processes has in another process that cannot"
                " load it: give the function by name, 'path/to/file.py:name'"
            )
        return (load_reward, self.origin)

    @property
    def together(self) -> bool:
        """True if it scores the episodes of a step in one call."""
        return self.form not in (Form.EPISODE, Form.VERL)

    @property
    def takes_environment(self) -> bool:
        """True if it looks into the environment, and is called before that is closed."""
        return "environment" in self.parts.values()

    def __call__(self, trajectories: Sequence[Trajectory], environment: object = None) -> object:
        """Returns the function's result, or a coroutine; without `together`, `trajectories` contains one."""
        tasks = [trajectory.task for trajectory in trajectories]
        if self.form is Form.TRL:
            return call_trl_reward(self.name, self.function, trajectories)
        if self.form is Form.BATCH:
            return self.function(list(trajectories), tasks)
        if self.form is Form.VERL_DATA:
            from agentgym.rewards.verl_data import call_verl_data  # imported here, since only verl's form needs torch

            return call_verl_data(self.name, self.function, trajectories)
        if self.form is Form.EPISODE:
            values_by_part = dict(zip(PARTS, (trajectories[0], tasks[0], environment), strict=True))
            return self._call_by_name({parameter: values_by_part[part] for parameter, part in self.parts.items()})
        rows = [
            (
                task.options.get("data_source", task.env_id),
                whole_reply(played),
                ground_truth(task),
                _extra(task.options),
            )
            for played, task in zip(trajectories, tasks, strict=True)
        ]
        if self.form is Form.VERL:
            return self.function(**dict(zip(VERL, rows[0], strict=True)))
        return self.function(
            **{f"{name}s": list(column) for name, column in zip(VERL, zip(*rows, strict=True), strict=True)}
        )

    def _call_by_name(self, inputs: Mapping[str, object]) -> object:
        kinds = inspect.signature(self.function).parameters
        positional = [value for name, value in inputs.items() if kinds[name].kind is inspect.Parameter.POSITIONAL_ONLY]
        keywords = {
            name: value for name, value in inputs.items() if kinds[name].kind is not inspect.Parameter.POSITIONAL_ONLY
        }
        return self.function(*positional, **keywords)

    def values(self, result: object, num_episodes: int) -> list[object]:
        """Returns one value per episode from the result of a call; raises InvalidReward for another number of them."""
        if not self.together:
            return [result]
        if not isinstance(result, Iterable) or isinstance(result, (str, bytes, Mapping)):
            raise InvalidReward(f"reward {self.name!r} gives a list, a number for each episode; got {result!r:.80}")
        values = list(result)
        if len(values) != num_episodes:
            raise InvalidReward(f"reward {self.name!r} gave {len(values)} rewards for {num_episodes} episodes")
        return values


def find_reward(name: str) -> RewardFunction:
    """Returns the function of a name in REWARDS, `package.module:name` or `path/to/file.py:name`.

    Raises UnknownName, and UserCodeFault if the module raises while it is loaded.
    """
    if not is_code_path(name):
        return REWARDS[name]
    target = load_named(name, REWARD_FUNCTION)
    if not callable(target):
        raise ConfigError(f"{name!r} is a {type(target).__name__}, not a reward function")
    function: RewardFunction = target
    return function


def load_reward(name: str, settings: Mapping[str, object]) -> RewardCall:
    """Returns the reward of a name, for a call in another process."""
    return RewardCall.of(find_reward(name), settings, name=name)


def _extra(options: Mapping[str, JSON]) -> JSON:
    return options.get("extra_info", {})


def _form(name: str, function: RewardFunction, batch: bool) -> Form:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the parameters of reward {name!r} cannot be read: {error}") from error
    names = list(parameters)
    if set(VERL[:3]) <= set(names):
        return Form.VERL
    if {f"{part}s" for part in VERL[:3]} <= set(names):
        return Form.VERL_BATCH
    if is_trl_reward(function):
        return Form.TRL
    positional = [parameter for parameter in parameters.values() if parameter.kind in POSITIONAL]
    required = [parameter.name for parameter in positional if parameter.default is parameter.empty]
    if required == ["data"]:
        return Form.VERL_DATA
    if batch and "trajectory" in required:
        raise ConfigError(f"reward {name!r} takes one trajectory: without manner=batch it is called once an episode")
    if required[:1] == ["trajectories"] or batch:
        if len(required) != 2 or (required[:1] == ["trajectories"] and required[1].strip("_") not in ("tasks", "")):
            raise _unfit(name, function, required)
        return Form.BATCH
    return Form.EPISODE


def _parts(name: str, function: RewardFunction) -> dict[str, str]:
    """Returns the part of an episode that each parameter takes; raises ConfigError for a parameter of another name.

    A name may begin with `_`. One letter or `_` alone, as in `lambda t, k: 1.0`, names nothing: such a parameter is
    the trajectory in the first place, and the task in the second.
    """
    parts: dict[str, str] = {}
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        plain, is_required = parameter.name.strip("_"), parameter.default is parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or not is_required:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and plain not in PARTS:
            continue  # a setting
        part = plain if plain in PARTS else "".join(PARTS[:2][index : index + 1]) if len(plain) < 2 else ""
        if not part or part in parts.values():
            raise _unfit(name, function, [parameter.name])
        parts[parameter.name] = part
    if not parts:
        raise _unfit(name, function, [])
    return parts


def _unfit(name: str, function: RewardFunction, stray: Sequence[str]) -> ConfigError:
    """Returns the error of a signature that fits no form."""
    which = f"takes {stray[0]!r}, which no reward is given" if stray else "takes nothing of an episode"
    near = nearest(stray[0], PARTS).removesuffix("?") if stray else ""
    near = ": write environment" if stray and stray[0] in ("env", "envs", "environments") else near
    return ConfigError(
        f"reward {name!r} {which}{near}. It takes {', '.join(list(Form)[:-1])} or {Form.TRL}, and settings after a"
        f" `*`; this is {_signature(function)}"
    )


def _with_settings(name: str, function: RewardFunction, settings: Mapping[str, object], form: Form) -> RewardFunction:
    if form is Form.TRL:
        return trl_reward_with_settings(name, function, settings)
    if form in (Form.VERL, Form.VERL_BATCH):
        return _verl_with_settings(name, function, settings)
    parameters = inspect.signature(function).parameters
    for setting in settings:
        if setting in parameters and parameters[setting].kind in POSITIONAL:
            raise ConfigError(
                f"{setting!r} of reward {name!r} is a setting if it comes after a `*` in {_signature(function)}"
            )
    return with_settings(f"reward {name!r}", function, settings, PARTS if form is Form.EPISODE else ())


def _signature(function: RewardFunction) -> str:
    return f"{getattr(function, '__name__', '')}{inspect.signature(function)}"


def _verl_with_settings(name: str, function: RewardFunction, settings: Mapping[str, object]) -> RewardFunction:
    """Binds the settings of a function of verl's form, where any parameter with a default is a setting."""
    parameters = inspect.signature(function).parameters
    verl_names = {*VERL, *(f"{part}s" for part in VERL)}
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    setting_names = [
        parameter.name
        for parameter in parameters.values()
        if parameter.name not in verl_names and parameter.kind is not parameter.VAR_KEYWORD
    ]
    check_setting_names(f"reward {name!r}", settings, setting_names, all_but=verl_names if open_ended else None)
    required = [
        setting
        for setting in setting_names
        if setting not in settings
        and parameters[setting].default is inspect.Parameter.empty
        and parameters[setting].kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    if required:
        raise ConfigError(f"reward {name!r} needs the settings {', '.join(required)}: reward.settings {required[0]}=…")
    accepts_extra = open_ended or {"extra_info", "extra_infos"} & set(parameters)
    if accepts_extra:
        return partial(function, **settings)
    return partial(_without_extra, partial(function, **settings))


def _without_extra(function: RewardFunction, **inputs: object) -> object:
    """Calls a function of verl's form that takes no extra_info."""
    return function(**{name: value for name, value in inputs.items() if not name.startswith("extra_info")})
