"""The code execution service of a run: its settings, and how all sandboxes of the run come to use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_at_least
from agentgym.url_credentials import read_key, refuse_credentials

__all__ = ["CONCURRENCY", "KEY", "SandboxConfig", "backend_of_run", "is_service", "used_by_run", "variables_of_run"]

URL, CONCURRENCY, KEY = "AGENTGYM_SANDBOX_URL", "AGENTGYM_SANDBOX_CONCURRENCY", "AGENTGYM_SANDBOX_KEY_ENV"
"""Variables that tell the processes of a run which service it uses."""


@config_class
class SandboxConfig:
    """The code execution service of a run; without a URL, programs run in boxes of the machine itself."""

    url: str = ""
    """The address of a service with SandboxFusion's API, `http://host:8080`. It runs the programs of the `code` reward,
    of CodeTasks and of the tools `python` and `shell`."""
    concurrency: int = 32
    """The most requests of one process that wait for the service at the same time."""
    api_key_env: str = ""
    """The environment variable with the service's key, which is sent as `Authorization: Bearer`."""

    def __post_init__(self) -> None:
        if self.url and not is_service(self.url):
            raise ConfigError(f"sandbox.url is the http:// address of a service, got {self.url!r}")
        refuse_credentials(self.url, "sandbox.url")
        check_at_least(1, self, "concurrency", where="sandbox.")
        read_key(self.api_key_env)


def is_service(backend: str) -> bool:
    """True if the backend of a sandbox is the address of a service."""
    return backend.startswith(("http://", "https://"))


@contextmanager
def used_by_run(config: SandboxConfig) -> Iterator[None]:
    """Makes the service that of all sandboxes which this process, and those that it starts, open as `auto`."""
    variables = {URL: config.url, CONCURRENCY: str(config.concurrency), KEY: config.api_key_env} if config.url else {}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def backend_of_run(backend: str) -> str:
    """Returns the kind of sandbox that `backend` is here: `auto` is the run's service, if it has one."""
    return os.environ.get(URL) or backend if backend == "auto" else backend


def variables_of_run() -> dict[str, str]:
    """Returns the variables that make the service of this process that of one elsewhere, which needs the key itself."""
    return {name: os.environ[name] for name in (URL, CONCURRENCY, KEY) if name in os.environ}
