"""Writes a small environment, and its test, for a user to start from."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from agentgym.errors import ConfigError

__all__ = ["new_env"]

ENVIRONMENT = '''"""{title}.

Try it: `agentgym play {file}:{cls}`
Check it: `agentgym env check {file}:{cls}`
"""

from __future__ import annotations

from typing import Any

from agentgym.envs import ToolEnv
from agentgym.tools import tool


class {cls}(ToolEnv):
    """A dial hides a number; each turn of it says whether the number is higher or lower."""

    system_prompt = "You open a lock by turning its dial. Use the tool `turn`."
    max_turns = 8  # the environment truncates after so many replies
    runs_inline = True  # short, pure computation only; delete this line when tools wait

    def start(self, options: dict[str, Any]) -> str:
        """Makes the task from self.np_random alone, so that a seed gives the same task; says it."""
        self.number = int(self.np_random.integers(0, 100))
        return f"Lock {{int(self.np_random.integers(10**6))}} opens at one number from 0 to 99."

    @tool
    def turn(self, number: int) -> str:
        """Turns the dial. (The model reads this text, the types and the text below.)

        Args:
            number: where to turn it, from 0 to 99
        """
        if number == self.number:
            self.end(success=True, reward=1.0)
            return "It opens."
        return "Higher." if number < self.number else "Lower."
'''

TEST = '''"""{title}: the contract that every environment keeps, and one episode that is won."""

from __future__ import annotations

from pathlib import Path

from agentgym.envs import make_env
from agentgym.testing import check_env

ENV = f"{{Path(__file__).with_name('{file}')}}:{cls}"


def test_the_environment_keeps_its_contract() -> None:
    assert check_env(ENV) == []


def test_halving_opens_the_lock() -> None:
    env = make_env(ENV)
    env.reset(seed=0)
    low, high, reward = 0, 99, 0.0
    while reward == 0.0 and low <= high:
        middle = (low + high) // 2
        observation, reward, *_ = env.step(f"turn {{middle}}")
        low, high = (middle + 1, high) if observation == "Higher." else (low, middle - 1)
    assert reward == 1.0
    env.close()
'''


def new_env(name: str, folder: Path | str = ".") -> tuple[Path, Path]:
    """Writes `name.py` and `test_name.py` into `folder`, and gives their paths.

    `name` is `number_lock`, `number-lock` or `NumberLock`. Raises ConfigError for another name, or a file in the way.
    """
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    module = "_".join(word.lower() for word in words)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or keyword.iskeyword(module):
        raise ConfigError(f"{name!r} cannot name an environment; use letters, digits and _, such as number_lock")
    place = Path(folder)
    paths = (place / f"{module}.py", place / f"test_{module}.py")
    for path in paths:
        if path.exists():
            raise ConfigError(f"{str(path)!r} exists already; choose another name or folder")
    place.mkdir(parents=True, exist_ok=True)
    values = {"cls": "".join(word.capitalize() for word in words), "file": paths[0].name}
    values["title"] = " ".join(word.lower() for word in words).capitalize()
    for path, text in zip(paths, (ENVIRONMENT, TEST), strict=True):
        path.write_text(text.format(**values), encoding="utf-8")
    return paths
