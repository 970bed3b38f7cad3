"""The files that a visitor of the repository meets first: pages with links that lead somewhere, forms that are read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from textwrap import indent

import pytest
import yaml

import agentgym

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), ROOT / "examples" / "README.md", ROOT / ".github" / "pull_request_template.md"]
FORMS = [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in headings(target), link


def test_the_page_of_examples_names_each_of_them() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    files = {path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.*")}
    public = {name for name in files if name[0] != "_" and name.endswith((".py", ".sh", ".yaml"))}
    public = {"harbor" if name.startswith("harbor/") else name for name in public}  # a folder of tasks is one example
    assert {name for name in public if f"]({name})" not in text} == set()


def test_each_block_of_the_page_on_grpo_is_in_its_example() -> None:
    example = (ROOT / "examples" / "minimal_loop.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "grpo.md").read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) > 5
    assert [block for block in blocks if indent(block, "    ") not in example] == []


def test_the_version_is_the_one_of_changelog_and_citation() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # that the format requires
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)[0]
    assert citation["version"] == newest == agentgym.__version__


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_is_yaml(form: Path) -> None:
    assert yaml.safe_load(form.read_text(encoding="utf-8"))


def test_the_workflow_calls_what_judges_a_change() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step][-1] == ".ci/run"


def test_an_issue_form_has_what_github_requires() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids) and all(field["attributes"]["label"] for field in form["body"])


def test_scripts_of_examples_are_sound_bash() -> None:
    scripts = sorted((ROOT / "examples").glob("*.sh"))
    assert len(scripts) >= 4
    for script in scripts:
        assert script.stat().st_mode & 0o111, script
        subprocess.run(["bash", "-n", script], check=True, timeout=60)
