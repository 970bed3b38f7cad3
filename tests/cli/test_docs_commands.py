"""Each command that README, docs and examples show has names and options that are there."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgym import cli
from agentgym.cli import options
from agentgym.cli.main import COMMANDS, command
from agentgym.cli.options import parse_options
from agentgym.errors import AgentGymError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
NOT_THERE = re.compile(
    r"(no|not a|cannot read|missing) .*(file|folder|run|FOLDER|RUN)|there is no|does not exist|Install s3fs", re.I
)
"""Errors of a command that is read, and names what only its reader has."""


class CommandWasRead(BaseException):
    """Ends a command once its options are read."""


def shown_commands(text: str) -> Iterator[str]:
    """Yields the lines of code blocks that begin with `agentgym`, with the lines that continue them."""
    is_code = is_fenced = False
    previous = ""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        is_code = is_fenced or (line.startswith("    ") and (is_code or not previous.strip()))
        stripped = line.strip().removeprefix("$ ")
        if is_code and stripped.startswith("agentgym "):
            yield stripped
        previous = line


def words_of(line: str) -> list[str]:
    """Returns the arguments of one command: without its comment, and without what a shell does with its output."""
    words = [word.strip("[]") for word in shlex.split(line, comments=True)[1:]]  # some show what is optional
    ends = [place for place, word in enumerate(words) if word in ("|", ">", "&&", ";", "&", "...") or word[:2] == "2>"]
    return words[: min(ends, default=len(words))]


CASES = [(page.name, line) for page in PAGES for line in shown_commands(page.read_text(encoding="utf-8"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({page for page, _ in CASES}))
def test_the_commands_of_a_page_are_read(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(kind: Any, args: Any, **settings: Any) -> Any:
        parse_options(kind, args, **settings)
        raise CommandWasRead

    monkeypatch.setenv("AGENTGYM_TOKEN", "key")
    for module in pkgutil.walk_packages(cli.__path__, "agentgym.cli."):  # one that is imported later would keep `read`
        importlib.import_module(module.name)
    monkeypatch.setattr(options, "parse_options", read)
    for name, module in list(sys.modules.items()):
        if name.startswith("agentgym.cli") and getattr(module, "parse_options", None) is parse_options:
            monkeypatch.setattr(module, "parse_options", read)
    problems = []
    for line in (line for name, line in CASES if name == page):
        try:
            words = words_of(line)
            command(words[0])(words[1:])
        except CommandWasRead:
            continue
        except (AgentGymError, ValueError, SystemExit) as error:
            if not NOT_THERE.search(str(error)):
                problems.append(f"{line}: {type(error).__name__}: {error}")
        else:
            problems.append(f"{line}: was run")
    assert problems == []


def test_most_commands_are_shown_somewhere() -> None:
    assert len(CASES) > 200
    names = {words_of(line)[0] for _, line in CASES if len(words_of(line)) > 0}
    assert set(COMMANDS) - names <= {"completion", "fake-server"}
