"""The compiler of the in-process engine, which the tests hide otherwise."""

from __future__ import annotations

import os

import pytest

from agentgym.engines.local.kernels.cpp_compiler import cpp_compiler


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows the compiler."""
    monkeypatch.delenv("CXX", raising=False)
    if cpp_compiler() is None:
        reason = "there is no C++ compiler: install g++"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> bool:
    """Whether the engine compiles, as the test's parameter says; if so, the compiler is shown."""
    if request.param:
        request.getfixturevalue("compiler")
    return bool(request.param)
