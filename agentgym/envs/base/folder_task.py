"""A task as a folder, as Harbor has it: files to begin with, an instruction, a solution and tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FolderTask"]

CONFIG = """\
schema_version = "1.4"

[metadata]
source = {source}

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0

[environment]
network_mode = "no-network"
cpus = 1
memory_mb = 512
storage_mb = 64
"""
DOCKERFILE = """\
FROM python:3.12-slim
WORKDIR /app
COPY files/ ./
"""
TEST = """\
#!/bin/sh
# A check that cannot run writes no reward: that is no verdict.
reward=$(python3 -I "${AGENTGYM_ROOT-}/tests/check.py") || exit
echo "$reward" > "${AGENTGYM_ROOT-}/logs/verifier/reward.txt"
"""
CHECK = '''\
"""Prints 1 if the working folder holds the expected files and no other, else 0."""

import json
import os
from pathlib import Path

root = Path(os.environ.get("AGENTGYM_ROOT") or "/")
expected = json.loads((root / "tests" / "expected.json").read_text())
files = {}
for path in sorted((root / "app").rglob("*")):
    if path.is_symlink() or not path.is_dir():
        is_plain = path.is_file() and not path.is_symlink()
        content = path.read_bytes().rstrip().decode("latin-1") if is_plain else None
        files[path.relative_to(root / "app").as_posix()] = content
print(int(files == expected))
'''


@dataclass(frozen=True, kw_only=True)
class FolderTask:
    """One task: `FolderTask(source="...", text="Remove b.", before={"b": ""}, after={}, solution="rm b")`.

    The task is done if `after` are the files of the working folder; blanks at their ends do not count.
    """

    source: str
    text: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    solution: str
    """The shell commands that do the task, in the working folder."""

    def to_harbor(self) -> dict[str, str]:
        """Returns the texts of the task's files, by their paths in a folder in Harbor's form."""
        expected = {path: content.encode().rstrip().decode("latin-1") for path, content in sorted(self.after.items())}
        return {
            "task.toml": CONFIG.format(source=json.dumps(self.source)),
            "instruction.md": f"{self.text}\n",
            "environment/Dockerfile": DOCKERFILE,
            **{f"environment/files/{path}": content for path, content in self.before.items()},
            "solution/solve.sh": f"#!/bin/sh\n{self.solution}\n",
            "tests/test.sh": TEST,
            "tests/check.py": CHECK,
            "tests/expected.json": json.dumps(expected, indent=1, ensure_ascii=True) + "\n",
        }
