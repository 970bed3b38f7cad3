"""The command that installs an extra names what agentgym was installed from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agentgym import extras

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file://FOLDER", "dir_info": {"editable": True}}, "pip install -e 'FOLDER[wandb]'"),
        ({"url": "file://FOLDER", "dir_info": {}}, "pip install 'FOLDER[wandb]'"),
        ({"url": "file:///gone", "dir_info": {}}, "pip install '.[wandb]' in a clone of agentgym"),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "0"}},
            "pip install 'agentgym-llm[wandb] @ git+https://host/a.git'",
        ),
        (
            {"url": "file:///w/a.whl", "archive_info": {}},
            "pip install 'agentgym-llm[wandb] @ file:///w/a.whl'",
        ),
        ({}, "pip install '.[wandb]' in a clone of agentgym"),
    ],
)
def test_the_command_names_the_source(
    origin: dict[str, object], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a clone"
    folder.mkdir()
    recorded = json.loads(json.dumps(origin).replace("FOLDER", str(folder).replace(" ", "%20")))
    monkeypatch.setattr(extras, "_origin", lambda: recorded)
    assert extras.install_extra("wandb") == command.replace("FOLDER", str(folder))


def test_no_message_or_page_names_a_distribution_that_no_index_has() -> None:
    examples = (path for path in (ROOT / "examples").rglob("*.*") if path.suffix != ".pyc")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *examples]
    texts = {path: path.read_text(encoding="utf-8") for path in [*pages, *(ROOT / "agentgym").rglob("*.py")]}
    assert len(texts) > 500
    assert [path for path, text in texts.items() if re.search(r"pip install [^@\n]*agentgym-llm\b", text)] == []
