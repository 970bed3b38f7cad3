"""Environments of the verifiers library, played in an interpreter of their own: it wants older packages than ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.adapter
PLAYED = Path(__file__).with_name("verifiers_played.py")


def test_environments_of_verifiers_are_played_evaluated_and_trained(verifiers_python: Path) -> None:
    command = [verifiers_python, "-m", "pytest", "-q", "-n", "0", "-m", "adapter", PLAYED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
