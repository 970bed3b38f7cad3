"""The documentation as a site: every page and public name is on it, every link of it leads somewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with the libraries of the extra `docs` in an environment of their own; a dead link fails it."""
    folder = tmp_path_factory.mktemp("site")
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    python = folder / "venv/bin/python"
    install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *needs]
    subprocess.run(install, check=True, timeout=300)
    build = [python, "-m", "mkdocs", "build", "--strict", "-q", "-f", ROOT / "mkdocs.yml", "-d", folder / "site"]
    built = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    locations = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"README"}
    assert {f"{page}.html" for page in pages} <= locations
    start = (site / "index.html").read_text()
    assert [page for page in pages if f'href="{page}.html"' not in start] == []


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = sorted((site / "api").glob("*.html"))
    assert len(pages) == 10
    for page in pages:
        package, text = import_module(page.stem), page.read_text()
        names = getattr(package, "__all__", None) or [name for name in dir(package) if name[0] != "_"]
        assert len(names) > 5
        assert [name for name in names if f"{page.stem}.{name}" not in text] == []


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        parts = page.read_text().split("<")
        loads = [part for part in parts if part.startswith(("script ", "link ", "img ")) and "://" in part]
        assert loads == [], page.name
