"""`agentgym play`: a person plays an environment in the terminal, by the commands or the JSON that a model uses."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import tyro

from agentgym.cli.display.tables import show_table
from agentgym.cli.environment import load_env
from agentgym.cli.options import env_as_argument, parse_options
from agentgym.cli.terminal import say
from agentgym.cli.tools_list import tool_rows
from agentgym.envs.base.action import Action
from agentgym.envs.base.policies import Policy, policy_for, policy_reply
from agentgym.envs.base.text_env import StepResult, TextEnv
from agentgym.envs.catalog.resolve import command_name
from agentgym.errors import ConfigError, describe_error
from agentgym.rollout.hosting.env_code import attempt, unwrap_user_outcome
from agentgym.types import JSON, Message, ToolCall

__all__ = ["main"]

with contextlib.suppress(ImportError):  # a Python without it edits lines less well
    import readline  # noqa: F401  # gives `input` arrow keys and a history

T = TypeVar("T")
HELP = """Type what you want to do; an environment with tools reads `name value`, `name key=value` and JSON:
  {"name": "go", "arguments": {"direction": "north"}}
Besides: help, tools, hint (the oracle's next move), quit. A line of your own that is one of these words
reaches the environment with a backslash before it: \\help"""


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """Plays an environment in the terminal: you are the model. Reads commands from a pipe, too."""

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """Environment id, package.module:Class or path/to/file.py:Class."""
    seed: int = 0
    """The seed of the task: the same seed is the same task."""
    env_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Keywords of the environment's class, such as level=2."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym play ...`; raises EnvironmentFault when the environment raises."""
    options = parse_options(PlayOptions, env_as_argument(args), prog="agentgym play")
    name = command_name(options.env, options.env_kwargs)
    game = Game(load_env(options.env, options.env_kwargs), options.seed, name)
    try:
        _play(game)
    except KeyboardInterrupt:
        say()
        say("Left.")
        return 130
    finally:
        game.env.close()
    _say_result(game)
    return 0


class Game:
    """One episode with a person in it."""

    def __init__(self, env: TextEnv, seed: int, name: str) -> None:
        self.env = env
        self.seed = seed
        self.name = name
        """The environment and its keywords, as on a command line."""
        self.total = 0.0
        self.num_turns = 0
        self.success: bool | None = None
        """The success; None until the episode is over, and for an environment that does not report one."""
        self.over = False
        self._observations: list[str] = []

    def begin(self) -> str:
        """Resets the environment and returns the first observation."""
        observation, _ = self._of_env(lambda: self.env.reset(seed=self.seed))
        self._observations = [observation]
        return observation

    def step(self, line: str) -> StepResult:
        """Plays one line."""
        result = self._of_env(lambda: self.env.step(Action(line)))
        observation, reward, terminated, truncated, info = result
        self._observations.append(observation)
        self.total += reward
        self.num_turns += 1
        self.over = terminated or truncated
        success = info.get("metrics", {}).get("success")
        self.success = None if success is None else bool(success)
        return result

    def _of_env(self, call: Callable[[], T]) -> T:
        """Returns the environment's answer; raises EnvironmentFault, with the command that replays it."""
        replay = f"agentgym play {self.name} --seed {self.seed}"
        return unwrap_user_outcome(attempt(call), f"{self.name} failed with seed {self.seed} (replay: {replay})")

    def hint(self) -> str:
        """Returns the oracle's next move after the observations so far."""
        try:
            oracle = policy_for(self.env, "oracle")
        except ConfigError as refusal:
            return f"There is no hint: {refusal}"
        error, message = attempt(lambda: self._ask(oracle))
        if message is None:
            return f"The oracle has no hint here ({error and describe_error(error)})."
        return format_reply(message)

    def _ask(self, oracle: Policy) -> Message:
        first, *later = self._observations
        oracle.reset(self.env, first, self.seed)
        message = policy_reply(oracle, first)
        for observation in later:
            message = policy_reply(oracle, observation)
        return message


def _play(game: Game) -> None:
    """Plays until the episode is over or the person leaves."""
    observation = game.begin()
    if game.env.system_prompt:
        say(game.env.system_prompt)
        say()
    say(observation)
    say()
    say("Commands besides the environment's own: help, tools, hint, quit.")
    while not game.over:
        line = _read()
        if line is None or line in ("quit", "exit"):
            return
        if line in META:
            META[line](game)
        elif line:
            observation, reward, *_ = game.step(line.removeprefix("\\"))
            say(observation)
            if reward:
                say(f"(reward {reward:g})")


def _read() -> str | None:
    """Reads the next line, without the space around it; None at the end of the input."""
    if sys.stdin.isatty():
        try:
            return input("> ").strip()
        except EOFError:
            say()
            return None
    line = sys.stdin.readline()
    if line:
        say(f"> {line.strip()}")
    return line.strip() if line else None


def _show_tools(game: Game) -> None:
    specs = game.env.tool_specs
    if specs:
        show_table(["tool", "parameters", "what it does"], tool_rows(specs))
    else:
        say("There are no tools: say what you want to say.")


META: dict[str, Callable[[Game], None]] = {
    "help": lambda game: say(HELP),
    "tools": _show_tools,
    "hint": lambda game: say(game.hint()),
}
"""Commands that are answered here and not by the environment."""


def format_reply(message: Message) -> str:
    """Formats a reply as a person would type it: `go north`."""
    lines = [message.content] if message.content else []
    for call in message.tool_calls:
        if isinstance(call, ToolCall):
            plain = all(isinstance(value, str | int | float) for value in call.arguments.values())
            words = [shlex.quote(str(value)) for value in call.arguments.values()]
            arguments = " ".join(words) if plain else json.dumps(call.arguments, ensure_ascii=False, default=dict)
            lines.append(f"{call.name} {arguments}".rstrip())
        else:
            lines.append(call.raw)
    return "\n".join(lines)


def _say_result(game: Game) -> None:
    verdict = {True: "success", False: "no success", None: "no verdict"}[game.success]
    end = verdict if game.over else "left before the end"
    say()
    say(f"{end}: reward {game.total:g} after {game.num_turns} turns (seed {game.seed})")
    say(f"evaluate: agentgym eval --env {game.name}")
    say(f"train:    agentgym train --env {game.name}")
