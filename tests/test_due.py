"""`.ci/due.sh`: a change makes those lanes due whose paths it touches, and what cannot be known is due."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CI = ROOT / ".ci"
PATHS = {
    lane: paths
    for line in (CI / "paths").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for lane, *paths in [line.split()]
}
LANES = [lane for lane in PATHS if lane != "every"]


def git(folder: Path, *words: str) -> str:
    """Runs git in a repository of the test."""
    command = ["git", "-C", str(folder), "-c", "user.name=tests", "-c", "user.email=tests@localhost", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def due(folder: Path) -> dict[str, str]:
    """The lanes that are due in a repository, each with the reason."""
    script = 'source .ci/due.sh; for lane in $(lane_names); do echo "$lane:$(why_due "$lane")"; done'
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    reasons = dict(line.split(":", 1) for line in done.stdout.splitlines())
    assert list(reasons) == LANES
    return {lane: reason for lane, reason in reasons.items() if reason}


def change(folder: Path, name: str) -> None:
    """Adds a line to a file of the repository, which need not exist."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write("x = 1\n")


@pytest.fixture(scope="module")
def passed_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with our table, all of whose lanes have passed at its last commit."""
    folder = tmp_path_factory.mktemp("passed")
    (folder / ".ci").mkdir()
    for name in ("paths", "due.sh"):
        shutil.copy(CI / name, folder / ".ci" / name)
    git(folder, "init", "--quiet")
    for name in ("README.md", "agentgym/tools/sandbox/box/plan.py", "agentgym/engines/sglang/engine.py"):
        change(folder, name)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    commit = git(folder, "rev-parse", "HEAD")
    (folder / ".ci" / "passed").write_text("".join(f"{lane} {commit}\n" for lane in LANES), encoding="utf-8")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "passed")
    return folder


@pytest.fixture
def repository(passed_repository: Path, tmp_path: Path) -> Path:
    """A copy of that repository, to be changed."""
    return Path(shutil.copytree(passed_repository, tmp_path / "repository"))


@pytest.mark.parametrize(
    ("name", "lanes"),
    [
        ("agentgym/tools/sandbox/box/plan.py", "sandbox containment containers other"),
        ("agentgym/engines/sglang/engine.py", "engines other"),
        ("agentgym/engines/local/engine.py", "engines training ray other"),
        ("agentgym/trainers/parallel/ranks.py", "training ray other"),
        ("agentgym/viewer/report.js", "browser other"),
        ("benchmarks/stand_ins.py", "training ray templates other"),
        ("docs/train.md", ""),
        (".ci/size.toml", ""),
        (".ci/smoke", " ".join(LANES)),
        ("agentgym/types.py", " ".join(LANES)),
    ],
)
def test_a_change_makes_the_lanes_of_its_path_due(repository: Path, name: str, lanes: str) -> None:
    change(repository, name)
    reasons = due(repository)
    assert list(reasons) == lanes.split()
    assert all(name in reason for reason in reasons.values())


def test_a_change_makes_the_same_lanes_due_when_it_is_committed(repository: Path) -> None:
    assert not due(repository)
    change(repository, "agentgym/viewer/report.js")
    reasons = due(repository)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "changed")
    assert reasons and due(repository) == reasons


def test_a_lane_that_passes_again_is_due_no_more(repository: Path) -> None:
    change(repository, "agentgym/tools/sandbox/box/plan.py")
    git(repository, "commit", "--quiet", "--all", "--message", "changed")
    script = 'source .ci/due.sh; write_passed "$(clean_commit)" sandbox other'
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=repository, timeout=60, check=True)
    assert list(due(repository)) == ["containment", "containers"]
    assert len((repository / ".ci" / "passed").read_text(encoding="utf-8").splitlines()) == len(LANES)


def test_the_first_lane_that_passes_begins_the_file(repository: Path) -> None:
    git(repository, "rm", "--quiet", ".ci/passed")
    git(repository, "commit", "--quiet", "--message", "unknown")
    script = 'source .ci/due.sh; write_passed "$(clean_commit)" browser'
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=repository, timeout=60, check=True)
    commit = git(repository, "rev-parse", "HEAD")
    assert (repository / ".ci" / "passed").read_text(encoding="utf-8") == f"browser {commit}\n"
    assert git(repository, "status", "--porcelain") == "?? .ci/passed"


@pytest.mark.parametrize("names", [["nope"], ["lint", "all"], ["lint tests"], ["-x"], ["lint", ""]])
def test_a_wrong_name_of_a_part_is_refused_before_anything_runs(names: list[str]) -> None:
    done = subprocess.run(["bash", CI / "run", *names], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and not done.stdout
    assert "all or due alone, or some of lint, tests, engines training" in done.stderr


def test_files_that_are_not_committed_are_those_of_no_commit(repository: Path) -> None:
    command = ["bash", "-euo", "pipefail", "-c", "source .ci/due.sh; clean_commit"]
    commits = []
    for name in ("", ".ci/passed", "docs/new.md"):
        if name:
            change(repository, name)
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=True)
        commits.append(done.stdout.strip())
    assert commits == [git(repository, "rev-parse", "HEAD")] * 2 + [""]


def test_a_clone_without_history_has_every_lane_due(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    reasons = due(tmp_path / "shallow")
    assert list(reasons) == LANES and all("is not in this clone" in reason for reason in reasons.values())
    shutil.rmtree(repository / ".git")
    assert list(due(repository)) == LANES
    (repository / ".ci" / "passed").unlink()
    assert set(due(repository).values()) == {"no commit at which it passed is known"}


def test_every_path_and_test_of_the_tables_exists_and_every_room_has_a_lane() -> None:
    names = [path for paths in PATHS.values() for path in paths if not path.startswith(":(glob)")]
    assert not [name for name in names if not (ROOT / name.removeprefix(":!")).exists()]
    smoke = [line.split(maxsplit=1) for line in (CI / "smoke").read_text(encoding="utf-8").splitlines()]
    tests = [(words[0], words[1].split("::")) for words in smoke if words and words[0] != "#"]
    assert {lane for lane, _ in tests} == set(LANES)
    for _, (file, *functions) in tests:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert all(f"def {name.split('[')[0]}(" in source for name in functions), (file, functions)
    script = (CI / "run").read_text(encoding="utf-8")
    assert all(f"    {lane}) selection=(" in script for lane in LANES)


def test_a_lane_with_tests_in_files_that_do_not_make_it_due_does_not_pass(repository: Path) -> None:
    change(repository, "tests/viewer/test_page.py")
    git(repository, "add", ".")

    def check(lane: str) -> subprocess.CompletedProcess[str]:
        script = f"source .ci/due.sh; check_paths {lane} echo tests/viewer/test_page.py::test_it"
        command = ["bash", "-euo", "pipefail", "-c", script]
        return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=False)

    assert check("browser").returncode == 0
    refused = check("sandbox")
    assert refused.returncode == 1
    assert refused.stdout == "tests of lane sandbox in files that do not make it due: tests/viewer/test_page.py\n"
