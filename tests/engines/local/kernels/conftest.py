"""The kernels are compiled in all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def compiler_is_shown(compiler: None) -> None:
    """Shows the compiler."""
