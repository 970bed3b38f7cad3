"""`make install` takes torch from TORCH_INDEX, and from pip's own index where that is empty."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny"
version = "1"
[project.optional-dependencies]
train = ["torch>=2.6"]
rewards = []
dev = []
"""
BACKEND = """
import zipfile
from pathlib import Path


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    path = Path(wheel_directory) / "tiny-1-py3-none-any.whl"
    needs = "".join(f"Provides-Extra: {extra}\\n" for extra in ("train", "rewards", "dev"))
    needs += "Requires-Dist: torch>=2.6; extra == 'train'\\n"
    with zipfile.ZipFile(path, "w") as wheel:
        about = f"Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n{needs}"
        wheel.writestr("tiny-1.dist-info/METADATA", about)
        wheel.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-1.dist-info/RECORD", "")
    return path.name
"""


def write_torch(folder: Path, version: str) -> None:
    """Writes a wheel of torch with nothing inside."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        about = f"torch-{version}.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[str]:
    """The address of two package indexes, `cpu` and `plain`."""
    write_torch(tmp_path / "indexes" / "cpu" / "torch", "2.13.0+cpu")
    write_torch(tmp_path / "indexes" / "plain" / "torch", "2.13.0")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "indexes"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def make(folder: Path, *words: str, pip_index: str = "") -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "TORCH_INDEX"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": pip_index, "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0"}
    command = ["make", f"PYTHON={sys.executable}", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


def write_project(folder: Path) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "constraints.txt").write_text("torch==2.13.0\n")
    shutil.copy(ROOT / "Makefile", folder)
    return folder


def test_the_default_is_torch_s_index_of_cpu_builds_where_linux_has_no_gpu(tmp_path: Path) -> None:
    has_gpu = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))
    commands = make(write_project(tmp_path / "project"), "-n", "install").stdout
    is_cpu = platform.system() == "Linux" and not has_gpu
    assert ("--index-url https://download.pytorch.org/whl/cpu torch" in commands) == is_cpu
    assert "--index-url" not in make(tmp_path / "project", "-n", "install", "TORCH_INDEX=").stdout


@pytest.mark.long
@pytest.mark.parametrize(("index", "version"), [("cpu", "2.13.0+cpu"), ("", "2.13.0")])
def test_torch_comes_from_the_index_that_is_named(tmp_path: Path, indexes: str, index: str, version: str) -> None:
    project = write_project(tmp_path / "project")
    address = f"{indexes}/{index}" if index else ""
    installed = make(project, "install", f"TORCH_INDEX={address}", pip_index=f"{indexes}/plain")
    assert installed.returncode == 0, installed.stderr
    probe = "from importlib.metadata import version; print(version('torch'), version('tiny'))"
    python = project / ".venv" / "bin" / "python"
    assert subprocess.check_output([python, "-c", probe], text=True).split() == [version, "1"]


@pytest.mark.long
def test_an_index_that_cannot_be_reached_is_named_and_pip_s_own_is_taken(tmp_path: Path, indexes: str) -> None:
    project = write_project(tmp_path / "project")
    done = make(project, "install", "TORCH_INDEX=http://127.0.0.1:9/cpu", pip_index=f"{indexes}/plain")
    assert done.returncode == 0 and "torch cannot be had from http://127.0.0.1:9/cpu: it comes from" in done.stderr
