"""Environments of Gymnasium's own interface, as a user would have them: text spaces, few actions, a drawing."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
from gymnasium.spaces import Box, Discrete, Text


class Echo(gymnasium.Env[str, str]):
    """Pays for a reply that has the shown number."""

    observation_space = Text(100)
    action_space = Text(100)

    def __init__(self, render_mode: str | None = None, digits: int = 1) -> None:
        self.render_mode = render_mode
        self.digits = digits
        self.number = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10**self.digits))
        return f"Say {self.number}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "Thanks.", float(str(self.number) in action), True, False, {}


class Corridor(gymnasium.Env[int, int]):
    """Four places in a row, with a drawing; the last one pays."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"]}
    observation_space = Discrete(4)
    action_space = Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.place = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place = max(0, self.place + 2 * action - 1)
        return self.place, float(self.place == 3), self.place == 3, False, {}

    def render(self) -> str:  # type: ignore[override]
        return "".join("x" if place == self.place else "." for place in range(4))


class Undrawn(Corridor):
    """Says that it draws, and takes no render mode."""

    def __init__(self) -> None:
        super().__init__()


class Wide(gymnasium.Env[Any, Any]):
    """Has more numbers than a text shows."""

    observation_space = Box(0, 1, (84, 84, 3))
    action_space = Discrete(2)


if "PlainEcho-v0" not in gymnasium.registry:  # this file is loaded by its path as well
    gymnasium.register("PlainEcho-v0", entry_point=Echo)
    gymnasium.register("PlainCorridor-v0", entry_point=Corridor, max_episode_steps=5)
