"""Hooks of mkdocs: the pages beside docs/, and a reference of the public names from their docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import indent
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGES = ("envs", "tools", "engines", "rollout", "rewards", "data", "evaluation", "testing", "trainers")
OUTSIDE = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    *("benchmarks/README.md", "examples/README.md"),
)
"""The pages outside of docs/ that the site has too."""
RENAMED = {"README.md": "index.md", "docs/README.md": "all_pages.md"}
"""The places in the site of pages that would both be its first one."""
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_config(config: Any) -> Any:
    """Adds the reference to the navigation."""
    reference = next(part for part in config["nav"] if "API" in part)
    reference["API"] = ["api/agentgym.md", *(f"api/agentgym.{name}.md" for name in PACKAGES)]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the reference, the pages outside of docs/, and every file that a page links to."""
    overview = files.get_file_from_path("README.md")
    assert overview is not None
    files.remove(overview)
    for place in ("docs/README.md", *OUTSIDE):
        add(files, config, place)
    for page in list(files.documentation_pages()):
        for place in links_of(page):
            if files.get_file_from_path(site_place(place)) is None and (ROOT / place).is_file():
                add(files, config, place)
    for name in ("agentgym", *(f"agentgym.{name}" for name in PACKAGES)):
        files.append(File.generated(config, f"api/{name}.md", content=reference(name)))
    return files


def add(files: Files, config: Any, place: str) -> None:
    """Adds a file of the repository to the site."""
    files.append(File.generated(config, site_place(place), content=(ROOT / place).read_bytes()))


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    if page.file.src_uri.startswith("api/"):
        return markdown
    depth = page.file.src_uri.count("/")

    def replace(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        if "://" in link:
            return match[0]
        return before + "../" * depth + site_place(repository_place(page.file, link)) + after

    return LINK.sub(replace, markdown)


def links_of(page: File) -> set[str]:
    """Returns the places in the repository that a page links to."""
    return {repository_place(page, link) for _, link, _ in LINK.findall(page.content_string) if "://" not in link}


def repository_place(page: File, link: str) -> str:
    """Returns the path from the repository's root of what a page links to."""
    sources = {site_place(place): place for place in OUTSIDE}
    folder = (ROOT / sources.get(page.src_uri, f"docs/{page.src_uri}")).parent
    return str((folder / link).resolve().relative_to(ROOT))


def site_place(place: str) -> str:
    """Returns the path in the site of a path in the repository."""
    return RENAMED.get(place, place.removeprefix("docs/"))


class Doctests(griffe.Extension):
    """Makes code blocks of the examples in docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Indents the examples of a docstring, which Markdown would take for quotations."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(
                lambda match: "\n\n" + indent(match[0].strip("\n"), "    "), obj.docstring.value
            )


def reference(package: str) -> str:
    """Returns a page of the reference: a section for each public name."""
    source = ROOT / package.replace(".", "/") / ("__init__.pyi" if package == "agentgym" else "__init__.py")
    places = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("agentgym.")
        for alias in node.names
        if node.module != "agentgym.lazy_exports"
    }
    sections = [
        f"::: {place}\n    options: {{heading: {package}.{name}, toc_label: {name}}}"
        for name, place in sorted(places.items())
    ]
    return "\n\n".join([f"# {package}", *sections]) + "\n"
