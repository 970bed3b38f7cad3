"""A task as files to begin with, an instruction, a solution and the files that should result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FolderTask"]


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
