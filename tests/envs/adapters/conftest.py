"""Interpreters with a library that does not live beside ours, built once and kept under `~/.cache`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parent / "environments"
ROOT = Path(os.environ.get("AGENTGYM_ADAPTERS", Path.home() / ".cache" / "agentgym-adapters"))


def python_with(name: str, *, over_ours: bool = False) -> Path:
    """An interpreter with what `environments/NAME.txt` pins; it is built where it is not there yet.

    `over_ours` has the packages of this interpreter behind those.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    made_of = requirements.read_bytes() + (sys.prefix.encode() if over_ours else b"")
    folder = ROOT / f"{name}-{hashlib.sha256(made_of).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r"]
        subprocess.run([*install, requirements], check=True, timeout=1200)
        if over_ours:
            ours = sysconfig.get_path("purelib")
            theirs = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
            (Path(theirs) / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        (folder / ".complete").touch()
    return python


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended in the end."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True, env=environ)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="session")
def openenv_python() -> Path:
    """An interpreter with the real OpenEnv."""
    return python_with("openenv")


@pytest.fixture(scope="session")
def verifiers_python() -> Path:
    """An interpreter with the verifiers library and all that this one has."""
    return python_with("verifiers", over_ours=True)


@pytest.fixture(scope="session")
def verifiers_0_4_python() -> Path:
    """An interpreter with the verifiers library of the new kind and all that this one has."""
    return python_with("verifiers-0.4", over_ours=True)
