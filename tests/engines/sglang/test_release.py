"""Releases of SGLang: one that is too old is refused before anything is asked of it."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Sampling
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.sglang.engine import open_sglang
from agentgym.engines.sglang.replica import OLDEST_RELEASE
from agentgym.errors import EngineError
from agentgym.testing.fake_server.control import VERSION, FakeControl
from agentgym.testing.fake_server.http import HttpAnswer, HttpCall
from agentgym.testing.fake_server.server import FakeSglang
from agentgym.testing.fixtures import fake_sglang

__all__ = ["fake_sglang"]
FakeRelease = Callable[[str | None], FakeSglang]


@pytest.fixture
def fake_release(fake_sglang: Callable[..., FakeSglang], monkeypatch: pytest.MonkeyPatch) -> FakeRelease:
    """`fake_release(version)`: a server that reports this version, or none."""
    server_info = FakeControl._server_info

    def start(version: str | None) -> FakeSglang:
        async def of_release(control: FakeControl, call: HttpCall) -> HttpAnswer:
            content = (await server_info(control, call)).content | {"version": version}
            return HttpAnswer(content if version else {key: content[key] for key in content if key != "version"})

        monkeypatch.setattr(FakeControl, "_server_info", of_release)
        return fake_sglang()

    return start


def sample(server: FakeSglang) -> tuple[int, ...]:
    """The ids of a reply of 8."""

    async def run() -> tuple[int, ...]:
        engine = await open_sglang(ServerConfig(urls=(server.url,)), embedded_folder())
        try:
            return (await engine.generate([5, 6, 7], Sampling(max_tokens=8), session="a")).ids
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("version", ["0.5.17", "0.5.22.post1", "0.4.99", "0.5.9rc1"])
def test_a_server_of_an_older_release_is_refused_by_its_version(version: str, fake_release: FakeRelease) -> None:
    server = fake_release(version)
    message = f"{server.url} runs SGLang {version}, and 0.5.23 or later is needed: update it"
    with pytest.raises(EngineError, match=f"^{re.escape(message)}$"):
        sample(server)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23rc1", "0.5.24.dev12+gabc1234", "0.6.0", "0.10", "1.0.0"])
def test_a_server_of_a_newer_release_is_accepted(
    version: str, fake_release: FakeRelease, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(sample(fake_release(version))) == 8
    assert not caplog.records


def test_a_server_that_was_built_without_its_version_is_accepted_with_a_warning(
    fake_release: FakeRelease, caplog: pytest.LogCaptureFixture
) -> None:
    server = fake_release("0.0.0.dev0")
    assert len(sample(server)) == 8
    assert f"{server.url} runs SGLang 0.0.0.dev0, which names no release: 0.5.23 or later is needed" in caplog.text


def test_a_server_that_reports_no_version_is_no_sglang(fake_release: FakeRelease) -> None:
    with pytest.raises(EngineError, match="is not an SGLang server: /server_info gave"):
        sample(fake_release(None))


def test_the_oldest_release_is_the_tested_one_and_that_of_the_extra() -> None:
    root = Path(__file__).parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["sglang"] == [f"sglang>={OLDEST_RELEASE}"]
    pinned = (root / "tests/engines/environments/sglang.txt").read_text(encoding="utf-8").splitlines()
    assert f"sglang=={OLDEST_RELEASE}" in pinned
    assert OLDEST_RELEASE == VERSION, "of the fake server"
