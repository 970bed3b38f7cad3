"""`agentgym docs`: the pages of the documentation, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say
from agentgym.errors import UnknownName, nearest

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class DocsOptions:
    """Prints a page of the documentation; without a name, the list of all pages by task."""

    page: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PAGE")] = "README"
    """Its name: `success_stays_zero`, `write_your_own` or `train.md`."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym docs ...`."""
    name = parse_options(DocsOptions, args, prog="agentgym docs").page.removeprefix("docs/").removesuffix(".md")
    pages = _pages()
    if name not in pages:
        raise UnknownName(f"no page {name!r}{nearest(name, pages) or '.'} `agentgym docs` lists them")
    text = pages[name].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        say(text)
        return 0
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))
    return 0


def _pages() -> Mapping[str, Path]:
    """Returns the pages by name. A wheel has them in the package, a clone beside it."""
    package = Path(__file__).parents[2]
    folder = next(folder for folder in (package / "docs", package.parent / "docs") if (folder / "README.md").is_file())
    return {path.stem: path for path in folder.glob("*.md")}
