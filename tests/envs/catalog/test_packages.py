"""Environments of other installed packages: found by id, listed without their libraries, named in results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from agentgym.cli.main import main
from agentgym.cli.scaffold import write_package
from agentgym.envs import make_env
from agentgym.envs.catalog import packages
from agentgym.envs.catalog.identity import digest_of_files, identify_env
from agentgym.envs.catalog.listing import listed_ids
from agentgym.errors import ConfigError, UnknownName

ROOT = Path(__file__).parents[3]


@pytest.fixture
def registry() -> Iterator[None]:
    """Forgets what a test registers."""
    before = set(gymnasium.registry)
    yield
    packages._loaded.clear()
    for env_id in set(gymnasium.registry) - before:
        del gymnasium.registry[env_id]


def install(project: Path, *, needs: str = "agentgym-llm>=0.1", **changes: str) -> Path:
    """Writes what pip would write into a folder of packages, which is returned."""
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    site = project.parent / "site"
    folder = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    folder.mkdir(parents=True)
    lines = [f"{key.capitalize()}: {about[key]}" for key in ("name", "version")]
    lines += [f"Summary: {about['description']}", f"Requires-Dist: {needs}"]
    (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]) + "\n")
    points = changes or about["entry-points"]["gymnasium.envs"]
    text = "".join(f"{name} = {value}\n" for name, value in points.items())
    (folder / "entry_points.txt").write_text(f"[gymnasium.envs]\n{text}")
    return site


def python(*words: object, path: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.long
def test_a_written_package_is_found_by_its_id_in_every_command(tmp_path: Path) -> None:
    project = write_package("number-lock", tmp_path).folder
    assert project == tmp_path / "number-lock"
    path = [install(project), project]
    code = "import sys, gymnasium; gymnasium.make('NumberLock-v0'); assert 'number_lock' in sys.modules"
    assert python("-W", "error", "-c", code, path=path, cwd=tmp_path).returncode == 0
    checked = python("-m", "agentgym", "env", "check", "NumberLock-v0", path=path, cwd=tmp_path)
    assert checked.returncode == 0 and "26 passed" in checked.stdout, checked.stdout
    words = "eval --env NumberLock-v0 --policy random -n 2 --output run --json".split()
    played = python("-m", "agentgym", *words, path=path, cwd=tmp_path)
    (environment,) = json.loads(played.stdout)["environments"]
    digest = digest_of_files(project / "number_lock")
    expected = {"id": "NumberLock-v0", "version": 0, "package": "number-lock", "package_version": "0.1.0"}
    assert environment == {**expected, "digest": digest}
    tested = python("-m", "pytest", "-q", "-p", "no:cacheprovider", project, path=path, cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout


@pytest.mark.long
def test_a_list_shows_packages_without_importing_what_their_environments_need(tmp_path: Path) -> None:
    project = write_package("number-lock", tmp_path).folder
    assert project is not None
    module = project / "number_lock" / "env.py"
    module.write_text(module.read_text().replace("from typing import Any", "import no_such_library\n"))
    path = [install(project), project]
    listed = python("-m", "agentgym", "env", "list", "--json", path=path, cwd=tmp_path)
    entry = json.loads(listed.stdout)["envs"][-1]
    assert (entry["id"], entry["package"], entry["card"]) == ("NumberLock-v0", "number-lock", None)
    assert entry["summary"].startswith("Two rooms with three exits")
    assert "number-lock 0.1.0" in listed.stderr
    played = python("-m", "agentgym", "play", "NumberLock-v0", path=path, cwd=tmp_path)
    assert played.returncode == 1 and "No module named 'no_such_library'" in played.stderr


@pytest.mark.usefixtures("registry")
def test_packages_register_with_or_without_a_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = write_package("rooms_a", tmp_path).folder
    assert project is not None
    monkeypatch.syspath_prepend(project)
    monkeypatch.syspath_prepend(install(project, rooms="rooms_a.more:register"))
    (project / "rooms_a" / "more.py").write_text(
        "import gymnasium\ndef register(): gymnasium.register(id='Hard-v1', entry_point='rooms_a.env:RoomsA')\n"
    )
    assert listed_ids()[-2:] == ["rooms/Hard-v1", "rooms/RoomsA-v0"]
    assert type(make_env("rooms/Hard-v1")).__name__ == "RoomsA"
    assert gymnasium.make("rooms/Hard-v1").unwrapped.spec is not None
    identity = identify_env("rooms/Hard-v1")
    assert (identity.version, identity.package, identity.package_version) == (1, "rooms-a", "0.1.0")
    assert main(["env", "export", "rooms/Hard-v1", "--to", "openenv", str(tmp_path / "out")]) == 0
    assert '"rooms-a==0.1.0"' in (tmp_path / "out" / "pyproject.toml").read_text()
    with pytest.raises(UnknownName, match="did you mean 'rooms/RoomsA-v0'"):
        make_env("rooms/RoomA-v0")


@pytest.mark.usefixtures("registry")
def test_a_package_that_fails_is_a_warning_and_others_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, stranger = (write_package(name, tmp_path / name).folder for name in ("rooms_b", "rooms_c"))
    assert broken is not None and stranger is not None
    (broken / "rooms_b" / "__init__.py").write_text("raise OSError('the licence server is down')")
    (stranger / "rooms_c" / "__init__.py").write_text("raise AssertionError")
    for project, needs in ((broken, "AgentGym_LLM[train] ; python_version > '3'"), (stranger, "gymnasium")):
        monkeypatch.syspath_prepend(project)
        monkeypatch.syspath_prepend(install(project, needs=needs))
    for _ in range(2):
        assert not {"RoomsB-v0", "RoomsC-v0"} & set(listed_ids())
    assert [record.getMessage() for record in caplog.records] == [
        "the environments of rooms-b 0.1.0 are not registered: OSError: the licence server is down"
    ]


@pytest.mark.usefixtures("registry")
def test_the_id_of_an_installed_environment_is_no_name_for_a_new_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write_package("rooms_d", tmp_path / "a").folder
    assert project is not None
    monkeypatch.syspath_prepend(install(project, __root__="rooms_d:register_envs"))
    monkeypatch.syspath_prepend(project)
    with pytest.raises(ConfigError, match=r"its package would hide the module 'rooms_d'"):
        write_package("rooms_d", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"'TextGame-v0' is an environment already; take another name"):
        write_package("text-game", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_digest_covers_code_and_data_and_nothing_that_python_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "rooms"
    (folder / "data").mkdir(parents=True)
    (folder / "env.py").write_text("x = 1\n")
    (folder / "data" / "rooms.jsonl").write_text("{}\n")

    def digest() -> str:
        digest_of_files.cache_clear()
        return digest_of_files(folder)

    first = digest()
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "env.pyc").write_text("compiled")
    (folder / ".notes").write_text("hidden")
    assert digest() == first
    (folder / "data" / "rooms.jsonl").write_text("{} \n")
    assert digest() != first
    (folder / "data" / "rooms.jsonl").write_text("{}\n")
    assert digest() == first
    (folder / "data" / "rooms.jsonl").rename(folder / "data" / "halls.jsonl")
    assert digest() != first


def test_an_identity_is_of_the_package_of_the_file_or_of_nothing(tmp_path: Path) -> None:
    bundled = identify_env("TextGame-v0")
    assert (bundled.version, bundled.package) == (0, "agentgym-llm")
    assert bundled.digest == identify_env("agentgym.envs.games.sudoku:Sudoku").digest
    file = tmp_path / "lock.py"
    file.write_text("x = 1\n")
    own = identify_env(f"{file}:Lock")
    assert (own.version, own.package, own.digest) == (None, None, digest_of_files(file))
    (tmp_path / "key.py").write_text("x = 2\n")
    assert identify_env(f"{tmp_path}/key.py:Lock").digest not in (None, own.digest)
    assert identify_env("CartPole-v1").package == "gymnasium"
    foreign = identify_env("textarena/Wordle-v0")
    assert (foreign.version, foreign.package, foreign.digest) == (0, None, None)


@pytest.mark.slow
def test_pip_installs_a_written_package_and_nothing_further_is_needed(tmp_path: Path) -> None:
    package = write_package("number-lock", tmp_path)
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    theirs = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
    (theirs / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (theirs / "root.pth").write_text(f"{ROOT}\n")
    interpreter = home / "bin" / "python"

    def run(*words: object) -> str:
        done = subprocess.run(
            [interpreter, *map(str, words)], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "pip", "install", "--quiet", "--no-deps", "-e", package.folder)
    assert "number-lock 0.1.0" in run("-m", "agentgym", "env", "list")
    assert "ok, 26 passed" in run("-m", "agentgym", "env", "check", package.code_path)
    run("-m", "agentgym", "eval", "--env", package.code_path, "--policy", "random", "-n", 2)
    assert "3 passed" in run("-m", "pytest", "-q", package.folder)
