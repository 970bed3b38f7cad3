"""Interpreters with a library that does not live beside ours, built once and kept under `~/.cache`."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parent / "environments"
ROOT = Path(os.environ.get("AGENTGYM_ADAPTERS", Path.home() / ".cache" / "agentgym-adapters"))


def python_with(name: str) -> Path:
    """An interpreter with what `environments/NAME.txt` pins; it is built where it is not there yet."""
    requirements = REQUIREMENTS / f"{name}.txt"
    folder = ROOT / f"{name}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r"]
        subprocess.run([*install, requirements], check=True, timeout=1200)
        (folder / ".complete").touch()
    return python


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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
