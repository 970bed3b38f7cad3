"""Settings of every test run: the doors are not collected, the whole suite has several processes, and property tests
never fail for a busy machine."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Torch's threads wait asleep: those of several processes that spin take the cores from each other, and five times as
long."""

collect_ignore = ["envs", "tools", "chat_templates", "trainers"]

settings.register_profile(
    "agentgym",
    deadline=None,
    print_blob=True,
    max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "30")),  # `.ci/run all` tries more
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("agentgym")  # in CI a commit meets the examples that it met before; elsewhere always new ones


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than cores for all plain or long tests, as they wait a sixth of their time; else none."""
    chosen = config.args != config.getini("testpaths") or config.option.keyword
    are_many = "not slow" in config.option.markexpr
    return min(4, (os.cpu_count() or 1) + 1) if are_many and not chosen else 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Makes cases of long tests slow; puts the folders with long files first in a suite of several processes, so that
    they end together."""
    _mark_further_cases(items)
    if not hasattr(config, "workerinput"):
        return
    long = ("tests/trainers", "tests/cli", "tests/evaluation", "tests/tools")
    items.sort(key=lambda item: not item.nodeid.startswith(long))


def _mark_further_cases(items: list[pytest.Item]) -> None:
    """Marks all but the first `n` cases of a test that is marked `long(cases=n)` as slow, before any is deselected."""
    numbers: Counter[tuple[pytest.Item | pytest.Collector | None, str]] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("long")) and (limit := mark.kwargs.get("cases")):
            test = item.parent, item.name.partition("[")[0]
            numbers[test] += 1
            if numbers[test] > limit:
                item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without garbage collections, a quarter of its time: nothing that is imported is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Spares full garbage collections the modules and the thousands of tests, which all stay until the end."""
    gc.collect()
    gc.freeze()
