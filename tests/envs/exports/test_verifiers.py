"""Exported environments under the real verifiers, in an interpreter of its own: it wants older packages than ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SERVED = Path(__file__).with_name("verifiers_served.py")


@pytest.mark.adapter
def test_exported_environments_are_played_by_verifiers(verifiers_python: Path) -> None:
    command = [verifiers_python, "-m", "pytest", "-q", "-n", "0", "-m", "adapter", SERVED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_without_the_library_its_package_is_named() -> None:
    code = "import sys; sys.modules['verifiers'] = None; import agentgym.envs.exports.verifiers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError: verifiers below 0.4 cannot be imported" in done.stderr
    assert "pip install " in done.stderr and "[verifiers]'" in done.stderr
