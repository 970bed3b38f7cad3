"""The log of the package, which actors take for themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def own_warnings() -> Iterator[None]:
    """Gives the log back that an actor takes for itself."""
    logger = logging.getLogger("agentgym")
    before = list(logger.handlers), logger.propagate
    yield
    logger.handlers, logger.propagate = before
