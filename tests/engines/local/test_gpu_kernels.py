"""The kernels of a GPU are right, and compile, where there is none: by Triton's interpreter and compiler.

On a GPU itself, `test_graphed_step.py` asks more: `pytest -m gpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "gpu_kernels_process.py"
TRITON = "triton==3.7.1"


@pytest.fixture(scope="module")
def triton_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with Triton, which a torch for CPUs does not bring."""
    folder = tmp_path_factory.mktemp("triton")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, "--target", str(folder), TRITON], check=True, timeout=900)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["interpret", "compile"])
def test_kernels_of_a_gpu_are_right_without_one(mode: str, triton_folder: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(triton_folder), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    if mode == "interpret":
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), mode], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("checked\n")
