"""`text/ID`: a Gymnasium environment with text or few actions (FrozenLake, your own), shown and played as text."""

from __future__ import annotations

import math
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import registry
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.spaces import Text as GymnasiumTextSpace
from gymnasium.spaces.text import alphanumeric

from agentgym.envs.adapters.namespaces import unknown_name
from agentgym.envs.adapters.own_randomness import OwnRandomness
from agentgym.envs.base.card import EnvCard, version_of
from agentgym.envs.base.spaces import Text
from agentgym.envs.base.text_env import Info, StepResult
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError
from agentgym.tools.calling.definition import Tool
from agentgym.types import JSON, ToolSpec

__all__ = ["GymnasiumText", "names"]

MAX_ACTIONS = 64
MAX_NUMBERS = 128
DEFAULT_TURNS = 100
"""The turn limit of an environment that is registered without one."""
ACTIONS = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""Maps the name of an environment to words for its actions, which Gymnasium only numbers; others keep the numbers."""
TOYS = "gymnasium.envs.toy_text"
"""The module of Gymnasium's environments whose steps are short pure computation."""
COLOURS = ("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
PAINT = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumText(ToolEnv):
    """Any environment that Gymnasium knows, if a text can say its observations and its actions are few, or are text.

    The model calls `act`, or says the action. What the environment draws as text is shown, colours as words:
    `[S|red]` is an S in red. Rewards are the environment's own; one above 0 is a success. `env` is an environment that
    was made already, by whatever name.
    """

    own_split = True  # a seed gives the same task as in the library itself

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        env_id: str,
        env: gymnasium.Env[Any, Any] | None = None,
        **settings: Any,
    ) -> None:
        if env is None and env_id not in registry:
            raise unknown_name("text", env_id, names())
        module = type(env.unwrapped).__module__ if env is not None else _module_of(registry[env_id].entry_point)
        self.runs_inline = module.startswith(TOYS)
        self._randomness = None if self.runs_inline else OwnRandomness()
        if env is None:
            drawn: dict[str, Any] = {"render_mode": "ansi"} if "ansi" in _render_modes(env_id) else {}
            with self._drawing(0):
                env = gymnasium.make(env_id, **settings, **drawn, disable_env_checker=True)
        self._env = env
        self._draws = env.render_mode == "ansi"
        self._words = _words(env_id, self._env.action_space)
        _check_observations(env_id, self._env.observation_space)
        super().__init__(render_mode, tools=[self._tool()])
        self.max_turns = (env.spec.max_episode_steps if env.spec else None) or DEFAULT_TURNS
        self.system_prompt = _system_prompt(env_id, self._words)
        self.card = EnvCard(
            task=f"Play {env_id}, an environment of Gymnasium, by text.",
            tools=("act",),
            reward="What the environment pays.",
            reward_range=(-math.inf, math.inf),
            data=f"{env_id} under the reset seed",
            version=version_of(env_id) or 0,
        )
        self._seed: int | None = None
        self._acted_in, self._cut = -1, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Begins an episode; the seed is the environment's own."""
        self._seed = seed
        return super().reset(seed=seed, options=options)

    def start(self, options: dict[str, Any]) -> str:
        """Resets the environment."""
        with self._drawing(self._seed):
            observation, _ = self._env.reset(seed=self._seed, options=options or None)
            return self._format_observation(observation)

    def step(self, action: str) -> StepResult:
        """Plays the action that a reply calls or names."""
        observation, reward, terminated, _, info = super().step(action)
        info["metrics"].pop("success", None)  # a Gymnasium environment has no verdict but its reward
        return observation, reward, terminated and not self._cut, self._cut, info

    def on_message(self, text: str) -> str:
        """Plays the one action that a reply names."""
        if self._words is None:
            return self._act(text)
        words = {word for word in self._words if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)}
        if len(words) != 1:
            fault = f"names {len(words)} actions" if words else "names no action"
            return f"Nothing was done: the reply {fault}. Name one of: {', '.join(self._words)}."
        return self._act(words.pop())

    def close(self) -> None:
        """Closes the environment, too."""
        self._env.close()
        super().close()

    def _tool(self) -> Tool:
        action: dict[str, JSON] = {"type": "string", "description": "what to do"}
        if self._words is not None:
            action["enum"] = list(self._words)
        schema: dict[str, JSON] = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        spec = ToolSpec("act", "Does one action.", {**schema, "additionalProperties": False})
        return Tool(spec=spec, fn=self._act, owner=self, timeout_s=None, on_error="raise")

    def _act(self, action: str) -> str:
        if self._acted_in == self.turns:
            return "Not done: one action in each reply."
        space: Any = self._env.action_space
        if self._words is None and not _holds(space, action):
            return f"Nothing was done: an action is a text that {space} holds."
        self._acted_in = self.turns
        played = action if self._words is None else int(space.start) + self._words.index(action)
        with self._drawing():
            observation, reward, terminated, truncated, _ = self._env.step(played)
            text = self._format_observation(observation)
        self.reward += float(reward)
        self._cut = bool(truncated) and not terminated
        if terminated or truncated:
            self.end(success=False)
        return f"Reward: {float(reward):g}.\n{text}"

    def _drawing(self, seed: int | None = None) -> AbstractContextManager[None]:
        """A context to draw from the process's random numbers in; Gymnasium's own environments have their own."""
        if self._randomness is None:
            return nullcontext()
        return self._randomness.again() if seed is None else self._randomness.start_stream(seed)

    def _prepare_episode(self) -> None:
        super()._prepare_episode()
        self._acted_in, self._cut = -1, False

    def _format_observation(self, observation: object) -> str:
        text = observation if isinstance(observation, str) else f"Observation: {_plain(observation)}"
        drawn = self._env.render() if self._draws else None
        return f"{_name_colours(drawn)}\n{text}" if isinstance(drawn, str) else text


def names() -> list[str]:
    """Gymnasium's own environments that are played as text, and those that others registered."""
    modules = {name: _module_of(spec.entry_point) for name, spec in registry.items() if "/" not in name}
    foreign = {name for name, module in modules.items() if not module.startswith(("gymnasium.", "agentgym."))}
    return sorted(foreign | {name for name, module in modules.items() if module.startswith(TOYS)})


def _module_of(entry_point: object) -> str:
    return entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")


def _render_modes(env_id: str) -> list[str]:
    maker: Any = registry[env_id].entry_point
    maker = gymnasium.envs.registration.load_env_creator(maker) if isinstance(maker, str) else maker
    return list(getattr(maker, "metadata", {}).get("render_modes", ()))


def _holds(space: GymnasiumTextSpace | Text, text: str) -> bool:
    """Returns True if a text is an action; the letters and digits of a space by default are no choice of its author."""
    if isinstance(space, Text):
        return space.contains(text)
    is_chosen = space.character_set != alphanumeric
    return space.contains(text) if is_chosen else space.min_length <= len(text) <= space.max_length


def _words(env_id: str, space: Space[Any]) -> tuple[str, ...] | None:
    """The words for the actions, in their order; None if an action is a text."""
    if isinstance(space, GymnasiumTextSpace | Text):
        return None
    if not isinstance(space, Discrete) or space.n > MAX_ACTIONS:
        raise ConfigError(
            f"{env_id} cannot be played: its actions are {space}, and a text names one of at most {MAX_ACTIONS} "
            "actions (Discrete) or is one (Text)"
        )
    names = ACTIONS.get(re.sub(r"-v\d+$", "", env_id), ())
    return names if len(names) == space.n else tuple(str(int(space.start) + i) for i in range(int(space.n)))


def _check_observations(env_id: str, space: Space[Any]) -> None:
    if _size(space) > MAX_NUMBERS:
        raise ConfigError(
            f"{env_id} cannot be shown as text: its observations are {space}, more than {MAX_NUMBERS} numbers"
        )


def _size(space: Space[Any]) -> float:
    """The count of numbers in an observation."""
    if isinstance(space, Tuple | Dict):
        return sum(_size(part) for part in (space.spaces.values() if isinstance(space, Dict) else space.spaces))
    if isinstance(space, Box | MultiBinary | MultiDiscrete):
        return math.prod(space.shape)
    return 1 if isinstance(space, Discrete | GymnasiumTextSpace | Text) else math.inf


def _plain(value: object) -> object:
    """An observation as Python writes it, without numpy's types."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, dict) else value


def _name_colours(drawn: str) -> str:
    """Replaces a drawing's terminal colours, which mark the player's position, by words."""

    def name_colour(match: re.Match[str]) -> str:
        codes = [int(code) for code in match[1].split(";") if code]
        colours = [COLOURS[code % 10] for code in codes if code // 10 in (3, 4) and code % 10 < len(COLOURS)]
        return f"[{match[2]}|{colours[0]}]" if colours else match[2]

    return PAINT.sub(name_colour, drawn).strip("\n")


def _system_prompt(env_id: str, words: tuple[str, ...] | None) -> str:
    how = (
        "Call the tool act with your action" if words is None else f"Call the tool act with one of: {', '.join(words)}"
    )
    return f"You play {env_id}. {how}. Do one action in each reply. [x|red] in a drawing is an x in red."
