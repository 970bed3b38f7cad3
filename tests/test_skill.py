"""The documentation as a skill: a folder that stands alone, with a page for each task."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentgym.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_skill_stands_alone_and_names_every_page(tmp_path: Path) -> None:
    folder = tmp_path / "agentgym"
    subprocess.run([sys.executable, ROOT / "docs" / "pages.py", "--skill", folder], check=True, timeout=120)
    text = (folder / "SKILL.md").read_text(encoding="utf-8")
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head).keys() == {"name", "description"}
    assert 100 < len(yaml.safe_load(head)["description"]) < 1024  # this is always in mind, the rest on demand
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert {page.name for page in (folder / "references").iterdir()} == pages | {"ARCHITECTURE.md"}
    links = {name.removeprefix("references/") for name in re.findall(r"\]\((references/[^)#]+)", body)}
    assert links >= pages - {"README.md"}
    assert set(re.findall(r"^    agentgym ([a-z-]+)", body, flags=re.M)) <= COMMANDS.keys()
    for page in [folder / "SKILL.md", *(folder / "references").iterdir()]:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            place = page.parent / link.partition("#")[0]
            assert link.startswith(("http", "#")) or place.exists(), (page.name, link)
