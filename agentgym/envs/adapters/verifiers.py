"""`verifiers/NAME`: an environment of the verifiers library; an episode is a row of its dataset, with its rubric."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import threading
from collections.abc import Sequence
from typing import Any

from agentgym.call_json import read_arguments
from agentgym.envs.adapters.namespaces import needs, unknown_name
from agentgym.envs.adapters.own_randomness import OwnRandomness
from agentgym.envs.adapters.verifiers_bridge import VERSION, Bridge, BridgedRollout, bridge_to
from agentgym.envs.adapters.verifiers_rollout import Asked, Rollout, RolloutEnded, library, watch
from agentgym.envs.base.action import Action
from agentgym.envs.base.card import EnvCard
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.loading import Wanted, load_module
from agentgym.openai_wire import MALFORMED
from agentgym.tools.calling.commands import read_calls
from agentgym.types import AnyCall, MalformedCall, Message, Role, ToolCall, ToolResult, ToolSpec

__all__ = ["Verifiers", "names"]

LARGEST_SEED = 2**31
NOT_RUN = "not run: the episode is over"
ROWS = ("train", "eval")
DEFAULT_TURNS = 100
"""The turns after which an environment without a limit of its own is truncated."""
ELSEWHERE = "Verifiers 0.4 may be in an environment of its own: --env-kwargs python=FOLDER/bin/python"
MODULE = Wanted(noun="environment", example="load_environment", hint="Its module has a function load_environment.")


class Verifiers(TextEnv):
    """A rollout of an environment of verifiers: its prompts, its tools, its turns, its rubric's reward.

    Seed S plays row S of its dataset, modulo the number of rows; `rows="eval"` plays its evaluation dataset, and
    `reset(options={"row": 3})` a row by its number. Where its code draws no random numbers, `side_by_side=True` lets
    episodes wait for judges and tools of theirs at the same time. Further keywords are those of `load_environment`.

    Verifiers 0.4 runs in a process of its own, of the interpreter `python`, or of this one if it has 0.4. There all
    episodes are side by side, rows are those of the taskset, and further keywords are those of its config.
    """

    own_split = True  # a seed gives the same task as in the library itself

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        name: str,
        rows: str = "train",
        side_by_side: bool = False,
        python: str | None = None,
        reply_timeout_s: float = 600.0,
        **settings: Any,
    ) -> None:
        super().__init__(render_mode)
        if rows not in ROWS:
            raise ConfigError(f"rows is one of {', '.join(ROWS)}, got {rows!r}")
        self.name = name
        self._timeout_s = reply_timeout_s
        self._bridge: Bridge | None = None
        self._rollout: Rollout | BridgedRollout | None = None
        self._messages: list[Any] = []
        self._specs: tuple[ToolSpec, ...] = ()
        self._randomness: OwnRandomness | None = None
        if python is not None or _installed_version().startswith(VERSION):
            if rows != "train":
                raise ConfigError(f"rows={rows!r} is of verifiers 0.3: a taskset of 0.4 has one set of rows")
            self._open_bridge = functools.partial(bridge_to, python, name, settings)
            self._bridge = self._open_bridge()
            self._num_rows, self.max_turns, self._pass_threshold = self._bridge.num_rows, DEFAULT_TURNS, 1.0
        else:
            self._environment = _load_environment(name, settings)
            self._dataset = _dataset(name, self._environment, rows)
            self._num_rows = len(self._dataset)
            self._randomness = None if side_by_side else OwnRandomness()
            self.max_turns = None if getattr(self._environment, "max_turns", -1) > 0 else DEFAULT_TURNS
            self._pass_threshold = float(getattr(self._environment, "pass_threshold", 1.0))
            self._specs = _specs(getattr(self._environment, "tool_defs", None) or ())
        self.card = EnvCard(
            task=f"Play {name}, an environment of verifiers.",
            tools=tuple(spec.name for spec in self._specs),
            reward="What its rubric says at the end.",
            reward_range=(-1e9, 1e9),
            data=f"{self._num_rows} rows of its dataset, by the reset seed",
        )

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """The tools of the environment, or those that the row names."""
        return self._specs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Begins a rollout of a row."""
        self._cancel()
        drawn = int(self.np_random.integers(LARGEST_SEED)) if seed is None else seed
        row = _row_number(options, drawn, self._num_rows)
        with contextlib.nullcontext() if self._randomness is None else self._randomness.start_stream(drawn):
            self._rollout = self._begin(row)
            event = self._rollout.next_event()
        if isinstance(event, RolloutEnded):
            raise EnvironmentFault(f"{self.name} was over before the model was asked")
        self._specs = _specs(event.tools)
        self._messages = event.messages
        messages = tuple(_message(message) for message in event.messages)
        return "\n".join(message.content for message in messages), {"messages": messages}

    def step(self, action: str) -> StepResult:
        """Passes a reply to the rollout, and plays on to the next request for one."""
        assert self._rollout is not None  # a step comes after a reset
        message = action.message if isinstance(action, Action) else None
        calls = _calls(action, self._specs)
        wired = [_encode_call(call) for call in calls]
        text = message.content if message is not None else "" if calls else str(action)
        with contextlib.nullcontext() if self._randomness is None else self._randomness.again():
            self._rollout.reply(text, message.reasoning if message is not None else None, wired)
            event = self._rollout.next_event()
        return self._step_result(calls, event)

    def close(self) -> None:
        """Ends a rollout that has not ended."""
        self._cancel()
        super().close()

    def _begin(self, row: int) -> Rollout | BridgedRollout:
        if self._bridge is None:
            return Rollout(self._environment, dict(self._dataset[row]), self._timeout_s)
        if not self._bridge.is_alive:
            self._bridge = self._open_bridge()
        return BridgedRollout(self._bridge, row, self._timeout_s)

    def _cancel(self) -> None:
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.cancel()

    def _step_result(self, calls: Sequence[AnyCall], event: Asked | RolloutEnded) -> StepResult:
        num_messages = len(self._messages)
        goes_on = event.messages[:num_messages] == self._messages
        new = event.messages[num_messages + 1 :] if goes_on else event.messages
        self._messages = event.messages
        results = _results(calls, new, {spec.name for spec in self._specs}, event.tool_errors)
        user_messages = [_message(message) for message in new if message.role != "tool"] if goes_on else []
        answers = [
            Message("tool", result.content, tool_call_id=result.call_id, name=result.name or None) for result in results
        ]
        info: Info = {"messages": (*answers, *user_messages), "tool_results": results}
        observation = "\n".join(message.content for message in info["messages"])
        if isinstance(event, Asked):
            if not goes_on:
                info["history"] = tuple(_message(message) for message in new)
                observation = info["history"][-1].content
            return observation, 0.0, False, False, info
        info["metrics"] = {**event.metrics, "success": float(event.reward >= self._pass_threshold)}
        observation = observation or f"Reward: {event.reward:g}."
        if not info["messages"]:
            info["messages"] = (Message("user", observation),)
        return observation, event.reward, not event.timed_out, event.timed_out, info


def names() -> list[str]:
    """The environments that are installed: packages that require verifiers and are named after their module."""
    if not _installed_version().startswith(VERSION):
        _library()
    env_names = set()
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"]).lower()
        if any(need.lower().startswith("verifiers") for need in distribution.requires or ()) and _is_module(name):
            env_names.add(name)
    return sorted(env_names)


_ENVIRONMENTS: dict[tuple[str, str], Any] = {}
_LOADING = threading.Lock()


def _load_environment(name: str, settings: dict[str, Any]) -> Any:
    """The environment, loaded once for all episodes in a process: its state is that of its rollouts."""
    vf = _library()
    key = (name, json.dumps(settings, sort_keys=True, default=repr))
    with _LOADING:
        if key not in _ENVIRONMENTS:
            _ENVIRONMENTS[key] = _make_environment(vf, name, settings)
        return _ENVIRONMENTS[key]


def _make_environment(vf: Any, name: str, settings: dict[str, Any]) -> Any:
    if not name.endswith(".py") and not _is_module(name):
        raise unknown_name("verifiers", name, names())
    try:
        with OwnRandomness().start_stream(0):
            if name.endswith(".py"):
                environment = load_module(name, f"verifiers/{name}", MODULE).load_environment(**settings)
            else:
                environment = vf.load_environment(name, **settings)
    except (AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"verifiers cannot load {name} with the keywords {settings}: {error}") from error
    if environment.requires_group_rollouts:
        raise ConfigError(f"the rubric of {name} scores the rollouts of a group together; here each is scored alone")
    watch(environment)
    return environment


def _installed_version() -> str:
    try:
        return importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _library() -> Any:
    try:
        return library()
    except ImportError as error:
        if version := _installed_version():
            raise ConfigError(f"verifiers {version} cannot be imported ({error}); 0.3 and 0.4 are read") from error
        raise ConfigError(f"{needs('verifiers', 'verifiers', error)}. {ELSEWHERE}") from error


def _is_module(name: str) -> bool:
    module = name.replace("-", "_").split("/")[-1]
    return module.isidentifier() and importlib.util.find_spec(module) is not None


def _dataset(name: str, environment: Any, rows: str) -> Any:
    try:
        dataset = environment.get_dataset() if rows == "train" else environment.get_eval_dataset()
    except ValueError as error:
        raise ConfigError(f"{name} has no dataset to train on ({error}): play it with rows='eval'") from error
    if not len(dataset):
        raise ConfigError(f"the dataset of {name} has no rows")
    return dataset


def _row_number(options: dict[str, Any] | None, seed: int, size: int) -> int:
    if options is None or "row" not in options:
        return seed % size
    row = options["row"]
    if not isinstance(row, int) or not 0 <= row < size:
        raise ConfigError(f"options['row'] is a number from 0 to {size - 1}, got {row!r}")
    return row


def _specs(tools: Sequence[Any]) -> tuple[ToolSpec, ...]:
    return tuple(ToolSpec(tool.name, tool.description, tool.parameters) for tool in tools)


def _message(message: Any) -> Message:
    """A message of the library's; a text without a role is the user's."""
    calls = tuple(_call(call) for call in getattr(message, "tool_calls", None) or ())
    role: Role = "user" if message.role == "text" else message.role
    reasoning = getattr(message, "reasoning_content", None)
    return Message(role, _text(message.content), reasoning, calls, getattr(message, "tool_call_id", None))


def _call(call: Any) -> AnyCall:
    try:
        arguments = read_arguments(call.arguments)
    except ValueError as error:
        return MalformedCall(call.id, call.arguments, str(error))
    return ToolCall(call.id, call.name, arguments)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.model_dump() if hasattr(part, "model_dump") else part for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise EnvironmentFault("the environment shows what is no text (an image, a sound); only text is played here")
    return "".join(part["text"] for part in parts)


def _calls(action: str, specs: Sequence[ToolSpec]) -> tuple[AnyCall, ...]:
    """The calls of a reply; text is read as a command only if a person typed it."""
    if isinstance(action, Action) and (action.tool_calls or action.message is not None):
        return action.tool_calls
    return read_calls(action, {spec.name: spec for spec in specs}) if specs else ()


def _encode_call(call: AnyCall) -> tuple[str, str, str]:
    if isinstance(call, MalformedCall):
        return call.id, MALFORMED, call.raw
    return call.id, call.name, json.dumps(call.arguments, ensure_ascii=False, default=dict)


def _results(
    calls: Sequence[AnyCall], messages: Sequence[Any], tool_names: set[str], errors: Sequence[str]
) -> tuple[ToolResult, ...]:
    """The answer to each call; a call that the environment did not answer was not run."""
    answers = {message.tool_call_id: _text(message.content) for message in messages if message.role == "tool"}
    results = []
    for call in calls:
        content = answers.get(call.id, NOT_RUN)
        if isinstance(call, MalformedCall):
            results.append(ToolResult(call.id, "", content, "truncated" if call.truncated else "malformed"))
            continue
        kind = "unknown_tool" if call.name not in tool_names else None
        if kind is None and (call.id not in answers or content in errors):
            kind = "tool_error"
        results.append(ToolResult(call.id, call.name, content, kind))
    return tuple(results)
