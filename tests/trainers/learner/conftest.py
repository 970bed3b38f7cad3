"""Small random models that the tests of the learner share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentgym.trainers.model_check.small_models import save_small_model


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder_of(name)`: the folder of a small random model of an architecture."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            save_small_model(name, folders[name])
        return folders[name]

    return make
