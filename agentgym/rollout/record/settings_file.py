"""`config.yaml`: the settings of a run, below comments that name what it was made with."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

import agentgym
from agentgym.errors import describe_error

__all__ = ["made_with", "settings_text"]

PACKAGES = ("torch", "transformers", "gymnasium", "sglang", "vllm")
"""The packages whose versions are named where they are installed."""
GIT_S = 5.0


def settings_text(settings: Mapping[str, Any]) -> str:
    """Returns the text of a new run's `config.yaml`: versions and the commit of the working folder, then YAML."""
    plain = json.loads(json.dumps(settings, default=dict))
    return f"# {_versions()}\n# {_commit()}\n" + yaml.safe_dump(plain, sort_keys=False)


def made_with(run: Path, max_bytes: int = 4096) -> list[str]:
    """Returns the comments at the head of a run's `config.yaml`; none if it has none or cannot be read."""
    try:
        with open(run / "config.yaml", encoding="utf-8", errors="replace") as file:
            lines = file.read(max_bytes).splitlines()
    except OSError:
        return []
    count = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [line.lstrip("# ") for line in lines[:count]]


def _versions() -> str:
    names = [f"agentgym {agentgym.__version__}", f"Python {platform.python_version()}"]
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            names.append(f"{name} {version(name)}")
    return ", ".join(names)


def _commit() -> str:
    """Returns the commit of the repository around the working folder, and whether tracked files differ from it.

    Where there is none, or git cannot tell, it returns the reason.
    """
    try:
        commit = _git("rev-parse", "HEAD").strip()
        changes = " with changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    except subprocess.CalledProcessError as error:
        return f"no commit is known: {(error.stderr.strip().splitlines() or [error])[0]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no commit is known: {describe_error(error)}"
    return f"commit {commit}{changes}"


def _git(*words: str) -> str:
    command = ["git", "--no-optional-locks", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_S).stdout
