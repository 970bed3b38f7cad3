"""`agentgym docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["success_stays_zero", "success_stays_zero.md", "docs/success_stays_zero.md"])
def test_a_page_is_printed_as_it_is(name: str, capsys: Any) -> None:
    assert main(["docs", name]) == 0
    assert capsys.readouterr().out.strip() == (ROOT / "docs" / "success_stays_zero.md").read_text().strip()


def test_without_a_name_all_pages_are_listed_and_a_wrong_one_is_refused(capsys: Any) -> None:
    assert main(["docs"]) == 0
    assert "[success_stays_zero.md](success_stays_zero.md)" in capsys.readouterr().out
    assert main(["docs", "sucess"]) == 2
    assert "no page 'sucess'" in capsys.readouterr().err


def test_every_page_that_a_message_names_is_there() -> None:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "agentgym").rglob("*.py"))
    names = {name for text in sources for name in re.findall(r"agentgym docs (\w+)`", text)}
    assert len(names) > 4 and not names - {path.stem for path in (ROOT / "docs").glob("*.md")}
