"""The memory that is reckoned with is that of the container, whichever version its control group has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from agentgym.engines.local import machine_memory as memory
from agentgym.engines.local.machine_memory import available_memory, total_memory

MIB = 1 << 20
VERSION_2 = {"memory.max": "64", "memory.current": "40", "memory.stat": "inactive_file 16"}
VERSION_1 = {
    "memory/memory.limit_in_bytes": "64",
    "memory/memory.usage_in_bytes": "40",
    "memory/memory.stat": "total_inactive_file 16",
}


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes a control group, whose numbers are MiB."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        label, _, number = text.rpartition(" ")
        path.write_text(f"{label} {int(number) * MIB}\n" if number.isdigit() else f"{text}\n")


@pytest.mark.parametrize("files", [VERSION_1, VERSION_2])
def test_a_containers_limit_counts_and_its_cache_of_files_is_free(
    files: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    write(tmp_path, files)
    assert total_memory() == 64 * MIB
    assert available_memory() == (64 - (40 - 16)) * MIB


@pytest.mark.parametrize("files", [{}, {**VERSION_2, "memory.max": "max"}])
def test_without_a_limit_it_is_the_machines(
    files: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    write(tmp_path, files)
    assert total_memory() == psutil.virtual_memory().total
    assert 0 < available_memory() < total_memory()
