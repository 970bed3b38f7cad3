"""`environments/build.sh`: one environment for each content of a requirement file, whole or not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ENVIRONMENTS = Path(__file__).parent / "environments"


def build(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a copy of the script that keeps its environments beside itself, and installs wheels from there alone."""
    env = {**os.environ, "AGENTGYM_ENGINES": str(script.parent / "built"), "PYTHON": sys.executable}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(script.parent)}
    return subprocess.run([script, *words], env=env, capture_output=True, text=True, timeout=300, check=False)


def folder_of(script: Path, name: str) -> Path:
    """Where the script keeps an environment."""
    return Path(build(script, "--path", name).stdout.strip()).parent.parent


def write_wheel(folder: Path, name: str) -> None:
    """Writes version 1 of a package that is one empty module."""
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A copy that knows `small`, whose two packages are wheels beside it."""
    folder = shutil.copytree(ENVIRONMENTS, tmp_path / "copy")
    (folder / "small.txt").write_text("torch==1\nsmall_engine==1\n", encoding="utf-8")
    for name in ("torch", "small_engine"):
        write_wheel(folder, name)
    return folder / "build.sh"


def test_an_unknown_environment_is_refused_with_those_that_there_are(script: Path) -> None:
    done = build(script, "sglnag")
    assert done.returncode == 2
    refusal, _, names = done.stderr.strip().partition(": there are ")
    assert refusal == "no engine environment 'sglnag' here"
    assert set(names.split()) == {"sglang", "small", "vllm"}


def test_another_requirement_is_another_environment(script: Path) -> None:
    before = folder_of(script, "small"), folder_of(script, "sglang")
    (script.parent / "small.txt").write_text("torch==1\nsmall_engine==2\n", encoding="utf-8")
    assert folder_of(script, "small") != before[0]
    assert folder_of(script, "sglang") == before[1]


@pytest.mark.engine
def test_a_half_built_environment_is_built_again_and_a_whole_one_is_kept(script: Path) -> None:
    folder = folder_of(script, "small")
    folder.mkdir(parents=True)
    (folder / "half").touch()
    done = build(script, "small", "small")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(", built in")[0] for line in lines] == [f"small: {folder}"] * 2
    assert sum("built in" in line for line in lines) == 1
    assert not (folder / "half").exists()
    words = [folder / "bin" / "agentgym-python", "-c", "import small_engine; print(small_engine.__file__)"]
    printed = subprocess.run(words, capture_output=True, text=True, check=False)
    assert printed.stdout.startswith(str(folder)), printed.stderr


@pytest.mark.engine
def test_an_environment_that_cannot_be_built_fails_and_is_not_there(script: Path) -> None:
    (script.parent / "small.txt").write_text("torch==1\nsmall_engine==2\n", encoding="utf-8")
    done = build(script, "small")
    assert done.returncode != 0 and "small_engine==2" in done.stderr
    assert not (folder_of(script, "small") / ".complete").exists()
