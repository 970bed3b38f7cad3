"""Writes tasks of an environment as folders in Harbor's form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from agentgym.cli.scaffold import fill_scaffold
from agentgym.envs.base.folder_task import FolderTask
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.catalog.resolve import command_name, stem_of
from agentgym.errors import ConfigError
from agentgym.types import JSON

__all__ = ["harbor_texts"]

TEMPLATES = {
    "task.toml": "task.toml",
    "environment/Dockerfile": "Dockerfile",
    "tests/test.sh": "test.sh",
    "tests/check.py": "check.py",
}
"""The templates by the path of the file that is written."""


def harbor_texts(env: TextEnv, name: str, kwargs: Mapping[str, JSON], seeds: range) -> dict[Path, str]:
    """Returns the texts of the tasks of these seeds, by path; each task has a folder.

    Raises ConfigError for an environment whose tasks are not files to work on.
    """
    write = getattr(env.unwrapped, "folder_task", None)
    if write is None:
        raise ConfigError(
            f"the tasks of {name} are not files to work on, as Harbor's are: it has no method folder_task(). "
            "Terminal-v0 has one; --to openenv and --to verifiers write any environment"
        )
    stem = re.sub(r"[^a-z0-9]+", "-", re.sub(r"-v\d+$", "", stem_of(name)).lower())
    words = [stem, *(f"{key}-{value}" for key, value in kwargs.items())]
    texts: dict[Path, str] = {}
    for seed in seeds:
        env.reset(seed=seed)
        task: object = write(f"agentgym: {command_name(name, kwargs)}, seed {seed}")
        if not isinstance(task, FolderTask):
            raise ConfigError(f"{name}.folder_task returned a {type(task).__name__}, not a FolderTask")
        folder = Path(re.sub(r"[^a-z0-9-]+", "-", "-".join([*words, str(seed)]).lower()))
        texts |= {folder / path: text for path, text in _task_texts(task).items()}
    return texts


def _task_texts(task: FolderTask) -> dict[str, str]:
    expected = {path: content.encode().rstrip().decode("latin-1") for path, content in sorted(task.after.items())}
    return {
        **{
            path: fill_scaffold("harbor", name, {"source": json.dumps(task.source)}) for path, name in TEMPLATES.items()
        },
        **{f"environment/files/{path}": content for path, content in task.before.items()},
        "instruction.md": f"{task.text}\n",
        "solution/solve.sh": f"#!/bin/sh\n{task.solution}\n",
        "tests/expected.json": json.dumps(expected, indent=1) + "\n",
    }
