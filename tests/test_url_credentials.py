"""No URL among a run's settings carries a secret."""

from __future__ import annotations

from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.engines.openai.config import ChatEndpointConfig
from agentgym.errors import ConfigError
from agentgym.rewards.remote import RemoteConfig
from agentgym.tools.sandbox.service_settings import SandboxConfig
from agentgym.url_credentials import read_key, refuse_credentials

SECRET = "SECRET7"


@pytest.mark.parametrize(
    "url",
    [
        f"https://user:{SECRET}@host/x",
        f"https://{SECRET}@host/x",
        f"http://host/x?key={SECRET}",
        f"http://host/x?page=1&api_key={SECRET}",
        f"http://host/x?apikey={SECRET}",
        f"http://host/x#access_token={SECRET}",
        f"openenv/http://u:{SECRET}@host:8000",
        f"ray://u:{SECRET}@host:1",
        f"postgresql://u:{SECRET}@host/db",
    ],
)
def test_a_url_with_a_secret_is_refused_wherever_it_is_and_is_not_repeated(url: str) -> None:
    settings: list[Any] = [url, {"a": {"b": [url]}}, ("fine", url)]
    for value in settings:
        with pytest.raises(ConfigError, match="holds a") as refused:
            refuse_credentials(value, "setting")
        assert SECRET not in str(refused.value) and "setting" in str(refused.value)


@pytest.mark.parametrize("key", ["sk-proj-SECRET7", "SECRET7+x/y=", "Bearer SECRET7"])
def test_a_key_in_place_of_its_variable_is_refused_and_not_repeated(key: str) -> None:
    for read_settings in (
        lambda: read_key(key),
        lambda: SandboxConfig(url="http://a", api_key_env=key),
        lambda: ChatEndpointConfig(api_key_env=key),
        lambda: RemoteConfig(url="http://a", api_key_env=key),
    ):
        with pytest.raises(ConfigError, match="named by its environment variable") as refused:
            read_settings()
        assert SECRET not in str(refused.value)


def test_plain_urls_and_texts_pass() -> None:
    plain = ["http://host:8000/v1?page=2&design=1&keyboard=us", "a@b.example", "file.py:Name", 3, None]
    refuse_credentials(plain)
    with pytest.raises(ConfigError, match="holds a"):  # none of them ends the search
        refuse_credentials([*plain, f"https://user:{SECRET}@host"])


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["--reward.remote.url", f"https://user:{SECRET}@h/x"],
        ["--reward.remote.url", f"https://h/x?key={SECRET}"],
        ["--reward.judge.url", f"https://h/x?key={SECRET}"],
        ["--server.urls", f"http://u:{SECRET}@h:1"],
        ["--server.urls", f"http://h:1?token={SECRET}"],
        ["--ray.address", f"ray://u:{SECRET}@h:1"],
        ["--env-kwargs", f"url=http://u:{SECRET}@h"],
    ],
)
def test_no_setting_of_training_prints_the_secret_of_a_url(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["train", "--env", "TextGame-v0", *words, "--print-config"])
    printed = capsys.readouterr()
    assert code != 0 and SECRET not in printed.out + printed.err
