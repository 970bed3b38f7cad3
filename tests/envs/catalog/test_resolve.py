"""Environments by id, module path and file path; Gymnasium's plugin."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentgym.envs import ToolEnv, make_env, resolve_env
from agentgym.envs.catalog.plugin import BUNDLED, register_envs
from agentgym.envs.games.text_game.env import TextGame
from agentgym.errors import ConfigError, UnknownName, UserCodeFault

ROOT = Path(__file__).parents[3]
LOCK = ROOT / "examples" / "number_lock.py"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_an_environment_is_found_by_id_module_and_file() -> None:
    assert type(make_env("GuessNumber-v0", {"level": 2})).__name__ == "GuessNumber"
    assert type(make_env("examples.number_lock:NumberLock")).__name__ == "NumberLock"
    factory = resolve_env(f"{LOCK}:NumberLock")
    assert type(factory()).__name__ == "NumberLock"
    assert factory() is not factory()
    assert type(factory()) is type(make_env(f"{LOCK}:NumberLock"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GuessNumbr-v0", r"did you mean 'GuessNumber-v0'\? `agentgym env list`"),
        ("examples.number_lok:NumberLock", r"no module 'examples\.number_lok'.*agentgym env list"),
        ("examples.number_lock:NumberLok", "did you mean 'NumberLock'"),
        (f"{LOCK}:Door", "it has NumberLock"),
        ("nowhere/lock.py:Lock", r"no file 'nowhere/lock\.py'"),
    ],
)
def test_an_unknown_name_is_a_taught_error(name: str, words: str) -> None:
    with pytest.raises(UnknownName, match=words):
        resolve_env(name)


def test_wrong_keywords_and_wrong_kinds_are_taught_errors() -> None:
    with pytest.raises(ConfigError, match=r"does not take the keyword 'size'"):
        make_env("GuessNumber-v0", {"size": 3})
    with pytest.raises(ConfigError, match=r"makes a int, which is no TextEnv and no gymnasium\.Env"):
        make_env("os:getpid")
    for name in ("builtins:int", "agentgym.envs.base.card:EnvCard"):
        with pytest.raises(ConfigError, match=f"the class '{name}' is no environment"):
            make_env(name)
    with pytest.raises(ConfigError, match=r"Pendulum-v1 cannot be played: its actions are Box"):
        make_env("Pendulum-v1")
    with pytest.raises(ConfigError, match="not an environment class"):
        make_env("agentgym.envs.base.seeds:EVAL_SEED_START")


@pytest.mark.parametrize(
    "make", [gymnasium.make, lambda name, **keywords: make_env(name, keywords)], ids=["gym", "ours"]
)
def test_a_misspelt_keyword_is_answered_with_the_nearest_and_all(make: Callable[..., object]) -> None:
    with pytest.raises(ConfigError) as caught:
        make("TextGame-v0", levle=3)
    message = "TextGame does not take the keyword 'levle': did you mean 'level'? It takes: level, shaped"
    assert str(caught.value) == message


def test_the_signature_of_a_class_is_that_of_its_constructor() -> None:
    assert list(inspect.signature(TextGame).parameters) == ["level", "shaped", "render_mode"]


def test_a_class_that_passes_keywords_on_takes_any() -> None:
    class Adapted(ToolEnv):
        def __init__(self, render_mode: str | None = None, **settings: object) -> None:
            super().__init__(render_mode)
            self.settings = settings

        def start(self, options: dict[str, object]) -> str:
            return "Go."

    assert Adapted(levle=3).settings == {"levle": 3}
    with pytest.raises(ConfigError, match=r"does not take the keyword 'levle'\. It takes: tools, tool_sources"):
        type("Plain", (ToolEnv,), {"start": Adapted.start})(levle=3)


def test_keywords_that_a_constructor_passes_on_are_listed_too() -> None:
    class Level(ToolEnv):
        def __init__(self, level: int = 1, **keywords: Any) -> None:
            super().__init__(**keywords)

    class Shaped(Level):
        def __init__(self, shaped: bool = False, **keywords: Any) -> None:
            super().__init__(**keywords)

    with pytest.raises(ConfigError, match=r"did you mean 'level'\? It takes: shaped, level, tools"):
        Shaped(levle=3)


def test_a_module_that_lacks_an_import_raises_its_own_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import no_such_library\n", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(
            UserCodeFault, match="cannot be loaded: ModuleNotFoundError: No module named 'no_such_library'"
        ):
            resolve_env(f"{path}:Env")


def test_registering_twice_does_nothing_and_loads_nothing() -> None:
    register_envs()
    register_envs()
    code = (
        "import sys, agentgym.envs.catalog.plugin as p; p.register_envs(); p.register_envs(); import gymnasium as g;"
        f"assert {sorted(BUNDLED)!r} == sorted(set(g.registry) & {set(BUNDLED)!r});"
        "heavy = [m for m in sys.modules if m.startswith('agentgym.envs.') and not m.endswith(('plugin', 'catalog'))];"
        "assert not heavy, heavy; assert 'torch' not in sys.modules and 'jsonschema' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True)


def test_gymnasiums_own_forms_work() -> None:
    assert type(make_env("agentgym:GuessNumber-v0")).__name__ == "GuessNumber"
    gymnasium.register("Lock-v0", "examples.number_lock:NumberLock", max_episode_steps=3)
    gymnasium.register("Endless-v0", Endless, max_episode_steps=3)
    try:
        assert make_env("Lock-v0").max_turns == 3
        assert make_env("Endless-v0").max_turns == 3
    finally:
        del gymnasium.registry["Lock-v0"], gymnasium.registry["Endless-v0"]


class Endless(ToolEnv):
    def start(self, options: dict[str, Any]) -> str:
        return "On and on."
