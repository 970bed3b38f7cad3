"""`agentgym env export` writes packages; `tests/envs/exports` has the libraries play them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentgym.cli.sharing.env_export import TEMPLATES

Command = Callable[..., Any]
LOCK = Path(__file__).parents[3] / "examples" / "number_lock.py"


@pytest.mark.parametrize("library", TEMPLATES)
@pytest.mark.parametrize("name", ["TextGame-v0", "dial_lock.py:NumberLock"])
def test_the_files_are_named_valid_and_as_ruff_writes_them(library: str, name: str, agentgym: Command) -> None:
    Path("dial_lock.py").write_text(LOCK.read_text())
    done = agentgym("env", "export", name, "--to", library, "out", "--json")
    assert done.code == 0, done.text
    written = {str(path) for path in Path("out").rglob("*") if path.is_file()}
    assert set(done.json["files"]) == written
    copied = name != "TextGame-v0"
    assert len(written) == len(TEMPLATES[library]) + copied == len(set(done.json["files"]))
    assert ("copy of dial_lock.py" in done.text) == copied
    project = tomllib.loads(Path("out/pyproject.toml").read_text())["project"]
    assert project["name"].endswith("number-lock-env" if copied else "text-game-env")
    assert "agentgym-llm>=0.1" in project["dependencies"]
    for words in (("check", "--select", "E4,E7,E9,F,UP,B,SIM"), ("format", "--diff")):
        command = [sys.executable, "-m", "ruff", words[0], "--isolated", "--no-cache", *words[1:], "out"]
        ruffed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ruffed.returncode == 0, ruffed.stdout + ruffed.stderr


def test_an_openenv_package_has_what_the_environment_claims(agentgym: Command) -> None:
    assert agentgym("env", "export", "Negotiation-v0", "--to", "openenv", "out", "--env-kwargs", "level=2").code == 0
    about = yaml.safe_load(Path("out/openenv.yaml").read_text())
    assert about["name"] == "negotiation_env" and about["app"] == "server.app:app"
    assert about["validation"]["reward"]["range"] == [0.0, 1.0]
    app = Path("out/server/app.py").read_text()
    assert 'ENV = "Negotiation-v0"' in app and "NegotiationObservation, {'level': 2})" in app


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["TextGame-v0", "--to", "openenv", "taken"], "'taken' exists already: name a new folder"),
        (["TextGame-v0", "--to", "openenv", "dial_lock.py"], "'dial_lock.py' exists already"),
        (["dial_lock:NumberLock", "--to", "verifiers", "out"], "is in no installed package: name its file"),
        (["app.py:NumberLock", "--to", "openenv", "out"], "the package itself has a file 'app.py'"),
        (["textarena/Wordle-v0", "--to", "openenv", "out"], "is an environment of another library"),
        (["TextGme-v0", "--to", "openenv", "out"], "did you mean 'TextGame-v0'"),
        (["TextGame-v0", "--to", "gym", "out"], "invalid choice 'gym'"),
        (["TextGame-v0", "out"], "missing --to"),
        (["TextGame-v0", "--to", "openenv"], "missing DIR"),
        (["TextGame-v0", "--to", "openenv", "out", "--env-kwargs", "levl=1"], "did you mean 'level'"),
        (["TextGame-v0", "--to", "openenv", "/proc/out"], "cannot write into '/proc/out'"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(words: list[str], message: str, agentgym: Command) -> None:
    Path("dial_lock.py").write_text(LOCK.read_text())
    Path("app.py").write_text(LOCK.read_text())
    Path("taken").mkdir()
    Path("taken/mine.txt").write_text("mine")
    done = agentgym("env", "export", *words)
    assert done.code == 2 and message in done.err and done.text.count("\n") == 1, done.text
    assert not Path("out").exists() and [path.name for path in Path("taken").iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_taken(agentgym: Command) -> None:
    Path("out").mkdir()
    assert agentgym("env", "export", "TextGame-v0", "--to", "verifiers", "out").code == 0
