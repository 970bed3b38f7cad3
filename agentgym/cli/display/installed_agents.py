"""The harnesses that `--agent` can start, as `agentgym doctor` shows them."""

from __future__ import annotations

import shutil

from agentgym.rollout.agents.agents import read_versions
from agentgym.rollout.agents.harnesses import HARNESSES

__all__ = ["agent_rows", "installed_agents"]

ANSWER_S = 20.0
"""The seconds that a program may take to print its version."""


def installed_agents() -> dict[str, str | None]:
    """Returns the version of each harness, `?` if it prints none; None if it is not installed."""
    versions: dict[str, str | None] = {}
    for name, harness in HARNESSES.items():
        program = shutil.which(harness.program)
        try:
            printed = [] if program is None else read_versions(program, harness, ANSWER_S)
        except OSError:
            printed = []
        version = harness.version if harness.version in printed else next(iter(printed), "?")
        versions[name] = None if program is None else version
    return versions


def agent_rows(versions: dict[str, str | None]) -> list[list[str]]:
    """Returns name, version and a remark for each harness."""
    rows: list[list[str]] = []
    for name, version in versions.items():
        tested = "the tested one" if version == HARNESSES[name].version else f"tested: {HARNESSES[name].install}"
        rows.append([name, version or "missing", tested])
    return rows
