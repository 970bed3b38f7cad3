"""Fixtures for pytest, for a conftest.py or test to import: `from agentgym.testing.fixtures import fake_sglang`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from agentgym.testing.fake_server.server import FakeConfig, FakeSglang

__all__ = ["fake_sglang"]


@pytest.fixture
def fake_sglang() -> Iterator[Callable[..., FakeSglang]]:
    """Yields a function that starts a fake SGLang server, which ends with the test: `fake_sglang(token_s=0.01).url`.

    Its keywords are the fields of `FakeConfig`; each call starts another server.
    """
    with ExitStack() as servers:

        def start(**settings: object) -> FakeSglang:
            return servers.enter_context(FakeSglang(FakeConfig(**settings)))  # type: ignore[arg-type]

        yield start
