"""Ids of other ecosystems: found by Gymnasium with no import of agentgym, and taught errors where they are not."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import pytest

from agentgym.cli.main import main
from agentgym.envs import make_env
from agentgym.envs.adapters.namespaces import NAMESPACES, namespace_of, spec_of
from agentgym.envs.catalog.resolve import stem_of
from agentgym.errors import ConfigError, UnknownName


def test_an_id_is_enough_for_gymnasium() -> None:
    code = (
        "import gymnasium, sys\nassert 'agentgym.envs.adapters' not in sys.modules\n"
        "env = gymnasium.make('text/FrozenLake-v1', is_slippery=False)\nprint(env.reset(seed=0)[0])\n"
        "print(env.spec.id, gymnasium.make_vec('text/FrozenLake-v1', 2).num_envs)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[S|red]FFF", "FHFH", "FFFH", "HFFG", "Observation: 0", "text/FrozenLake-v1 2"]


def test_a_spec_is_registered_when_it_is_asked_for_and_makes_the_same_again() -> None:
    env = gymnasium.make("text/Blackjack-v1")
    assert env.spec is not None
    assert env.spec.id in gymnasium.registry
    assert gymnasium.make(env.spec).reset(seed=3)[0] == env.reset(seed=3)[0]
    assert spec_of("text/Blackjack-v1") is gymnasium.spec("text/Blackjack-v1")


def test_two_ids_that_gymnasium_would_spell_alike_are_two() -> None:
    folder, dashed = spec_of("verifiers/a/b.py"), spec_of("verifiers/a-b.py")
    assert folder is not None and dashed is not None
    assert (folder.kwargs["name"], dashed.kwargs["name"]) == ("a/b.py", "a-b.py")
    assert spec_of(folder.id) is folder and spec_of(dashed.id) is dashed


@pytest.mark.parametrize(
    ("name", "namespace"),
    [
        ("text/FrozenLake-v1", "text"),
        ("reasoning_gym/leg_counting", "reasoning_gym"),
        ("text/game.py:Game", None),
        ("text/", None),
        ("ALE/Pong-v5", None),
        ("TextGame-v0", None),
    ],
)
def test_the_namespace_is_what_stands_before_the_first_slash(name: str, namespace: str | None) -> None:
    assert namespace_of(name) == namespace


def test_an_unknown_name_is_a_taught_error() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'FrozenLake-v1'\? `agentgym env list --namespace text`"):
        make_env("text/FrozenLak-v1")
    with pytest.raises(UnknownName, match=r"unknown env 'FrozenLak-v1': did you mean"):
        make_env("FrozenLak-v1")


def test_a_library_that_is_not_installed_is_a_taught_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[reasoning-gym\]'"):
        make_env("reasoning_gym/leg_counting")
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[verifiers\]'"):
        make_env("verifiers/wordle")


def test_a_folder_is_named_after_the_whole_id() -> None:
    assert stem_of("text/FrozenLake-v1") == "text-FrozenLake-v1"
    assert stem_of("examples/number_lock.py:NumberLock") == "NumberLock"
    assert stem_of("TextGame-v0") == "TextGame-v0"


def test_the_list_tells_of_every_namespace_and_of_the_ids_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list", "--adapters"]) == 0
    output = capsys.readouterr().out
    assert all(f"{name}/" in output for name in NAMESPACES)
    assert main(["env", "list", "--namespace", "text"]) == 0
    assert {"text/Taxi-v4", "text/Blackjack-v1"} <= set(capsys.readouterr().out.split())
    assert main(["env", "list", "--namespace", "txt"]) == 2
    assert "did you mean 'text'?" in capsys.readouterr().err
