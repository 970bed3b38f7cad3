"""`docs/families.md` says what holds for each family, and a command makes it."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from family_matrix import family_matrix, matrix_markdown, stand_in

from agentgym.chat_templates import ChatTokenizer
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.embedded import embedded_folder

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"
TEMPLATES = ROOT.parent / "shared" / "data" / "chat_templates"


def table_rows(page: str) -> list[list[str]]:
    """The cells of every row, headings left out."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[0] != "family" and set(row[0]) != {"-"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded template, as it is and without its calls."""
    template = ChatTokenizer.load(embedded_folder()).template
    (tmp_path / "whole.jinja").write_text(template, encoding="utf-8")
    (tmp_path / "callless.jinja").write_text(template.replace("message.tool_calls", "message.none"), encoding="utf-8")
    return tmp_path


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `python benchmarks/family_matrix.py FOLDER`."""
    script = ROOT / "benchmarks" / "family_matrix.py"
    words = [sys.executable, str(script), str(folder)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


def ticking() -> Callable[[], float]:
    """A clock that moves by a millisecond at each look."""
    return itertools.count(step=0.001).__next__


def test_the_committed_page_names_every_family_and_no_other() -> None:
    families = {row[0] for row in table_rows(PAGE.read_text(encoding="utf-8"))}
    assert families == {entry.name for entry in FORMATS.values()}


def test_the_committed_page_lists_one_failure_of_a_template_without_calls() -> None:
    rows = [row for row in table_rows(PAGE.read_text(encoding="utf-8")) if len(row) > 3]
    assert len(rows) >= 27
    failed = [(row[1], place) for row in rows for place, cell in enumerate(row) if "no**" in cell]
    assert failed == [("LFM2-8B-A1B", 4)]


def test_each_note_of_the_committed_page_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    used = {int(number) for row in table_rows(page) for cell in row for number in re.findall(r"\[(\d+)\]", cell)}
    assert used == {int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)}


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason=f"the shared test data {TEMPLATES} is not beside this checkout")
def test_the_committed_page_has_a_row_for_every_shared_template() -> None:
    rows = table_rows(PAGE.read_text(encoding="utf-8"))
    assert {file.stem for file in TEMPLATES.glob("*.jinja")} == {row[1] for row in rows if len(row) > 3}


def test_a_row_lists_what_holds_and_a_note_what_fails(folder: Path) -> None:
    page = matrix_markdown(family_matrix(folder, ticking()))
    callless, whole = [row for row in table_rows(page) if len(row) > 3]
    assert whole == ["hermes", "whole", "ChatMLRenderer", *["yes"] * 8, "16 µs, x0.06"]
    assert callless[:2] == ["hermes", "callless"]
    assert callless[3] == callless[5] == "yes" and callless[4].startswith("**no** [")
    assert callless[7].startswith("no [")
    number = callless[7].removeprefix("no [").removesuffix("]")
    assert f"{number}. several_calls: the template leaves out the reply's calls" in page


def test_a_stand_in_has_the_marks_of_its_template() -> None:
    tokenizer = stand_in("[INST]{{ messages[0].content }}[/INST]<|foot|><b>{{ eos_token }}", "unknown")
    backend = tokenizer.backend
    assert all(backend.token_to_id(mark) is not None for mark in ("[INST]", "[/INST]", "<|foot|>"))
    assert backend.token_to_id("<b>") is None
    assert backend.token_to_id(tokenizer.special_tokens["eos_token"]) is not None


def test_a_stand_in_has_the_marks_that_its_template_composes() -> None:
    source = "{% set end = '<｜foot{}｜>'.format(':x') %}{% for m in messages %}{{ m.content + end }}{% endfor %}"
    assert stand_in(source, "unknown").backend.token_to_id("<｜foot:x｜>") is not None


def test_a_stand_in_ends_with_the_end_of_its_family() -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>{{ eos_token }}"
    assert stand_in(source, "unknown").stop_tokens == ("<|end|>",)


@pytest.mark.slow
def test_the_script_prints_the_page(folder: Path) -> None:
    done = run_script(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# Model families\n") and "## How to read it" in done.stdout
    assert {row[0] for row in table_rows(done.stdout)} == {entry.name for entry in FORMATS.values()}


@pytest.mark.long
def test_a_folder_without_templates_is_named(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 2
    assert "holds no *.jinja: give a folder of chat templates" in done.stderr
