"""The compiler of the kernels."""

from __future__ import annotations

import os

import pytest

from agentgym.engines.local.kernels.cpp_compiler import cpp_compiler


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler that the tests hide otherwise."""
    monkeypatch.delenv("CXX", raising=False)
    if cpp_compiler() is None:
        reason = "there is no C++ compiler: install g++"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
