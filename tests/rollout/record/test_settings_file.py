"""`config.yaml` begins with what made the run, and holds its settings."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

import agentgym
from agentgym.evaluation.play.config import EvalConfig
from agentgym.evaluation.play.evaluate import evaluate
from agentgym.rollout.record.settings_file import made_with, settings_text

SETTINGS = {"env": "TextGame-v0", "tags": ("a", "b"), "note": "# no comment"}


def test_a_run_names_versions_and_the_commit_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    outside = settings_text(SETTINGS)
    assert yaml.safe_load(outside) == {**SETTINGS, "tags": ["a", "b"]}
    (tmp_path / "config.yaml").write_text(outside, encoding="utf-8")
    versions, commit = made_with(tmp_path)
    assert versions.startswith(f"agentgym {agentgym.__version__}, Python 3.") and ", gymnasium " in versions
    assert commit.startswith("no commit is known: fatal: not a git repository")
    with monkeypatch.context() as context:
        context.setenv("PATH", str(tmp_path))
        assert "No such file or directory: 'git'" in settings_text({}).splitlines()[1]

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "env.py").write_text("1\n", encoding="utf-8")
    git("add", "env.py")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert settings_text({}).splitlines()[1] == f"# commit {head}"
    (tmp_path / "env.py").write_text("2\n", encoding="utf-8")
    assert settings_text({}).splitlines()[1] == f"# commit {head} with changes"


def test_an_evaluation_records_it_and_goes_on_with_another_commit(tmp_path: Path) -> None:
    config = EvalConfig(env="TextGame-v0", policy="oracle", num_tasks=2)
    evaluate(config, output=tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    assert made_with(tmp_path / "run")[0].startswith("agentgym ")
    path.write_text(path.read_text(encoding="utf-8").replace("# ", "# other "), encoding="utf-8")
    assert evaluate(config, output=tmp_path / "run", resume=True).summary.success == 1


@pytest.mark.parametrize("text", ["", "env: a\n", "# " + "x" * 100_000, "\x00\xff"])
def test_a_file_without_comments_or_with_long_ones_is_read(text: str, tmp_path: Path) -> None:
    assert made_with(tmp_path) == []
    (tmp_path / "config.yaml").write_text(text, encoding="latin-1")
    assert len("".join(made_with(tmp_path))) < 5000
