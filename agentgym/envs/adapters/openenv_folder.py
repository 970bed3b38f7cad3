"""`openenv/path/to/env`: a folder with `openenv.yaml`, whose server this process starts and ends."""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
from pathlib import Path

from agentgym.envs.adapters.other_python import OtherProcess, check_python
from agentgym.errors import ConfigError
from agentgym.yaml_text import parse_yaml

__all__ = ["is_folder", "url_of_folder"]

VERSION = "0.10."
"""The versions whose servers are started; one that runs may be older."""
MANIFEST = "openenv.yaml"
RUNTIME = "fastapi"
START_S = 180.0
"""The seconds to start the server; the libraries of an environment may take long to import."""
RUNNING = re.compile(r"running on (http://[\d.]+:\d+)")

_servers: dict[tuple[int, str, Path], tuple[OtherProcess, str]] = {}
_starting = threading.Lock()


def is_folder(name: str) -> bool:
    """True if the name is a folder, and not the URL of a server."""
    return "://" not in name and Path(name).is_dir()


def url_of_folder(name: str, python: str | None) -> str:
    """Returns the URL of the folder's server, which is started if it does not run; it ends with this process.

    Raises ConfigError for a folder that is no environment, and for a server that does not start.
    """
    key = (os.getpid(), os.path.expanduser(python or sys.executable), Path(name).resolve())
    with _starting:
        if key not in _servers or not _servers[key][0].is_alive:
            _servers[key] = _start(*key[1:])
        return _servers[key][1]


def _start(python: str, folder: Path) -> tuple[OtherProcess, str]:
    app = _app_of(folder)
    check_python(python, "openenv", VERSION)
    if (folder / "__init__.py").exists() and folder.name.isidentifier():
        app = f"{folder.name}.{app}"  # its modules import each other as those of a package
    urls: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def find_url(line: str | None) -> None:
        match = RUNNING.search(line or "")
        if match or line is None:
            urls.put(match and match[1])

    command = [python, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", "0", "--no-access-log"]
    process = OtherProcess("server", command, [folder.parent, folder], find_url)
    try:
        url = urls.get(timeout=START_S)
    except queue.Empty:
        url = None
    if url is None:
        process.close()
        raise ConfigError(f"the OpenEnv server of {folder} did not start: {process.last_lines}")
    return process, url


def _app_of(folder: Path) -> str:
    """Returns the application that the manifest names."""
    path = folder / MANIFEST
    try:
        manifest = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): a folder of OpenEnv has one") from error
    values = manifest if isinstance(manifest, dict) else {}
    if values.get("runtime", RUNTIME) != RUNTIME:
        raise ConfigError(f"{path}: its runtime is {values['runtime']!r}; {RUNTIME!r} is started")
    app = values.get("app", "server.app:app")
    if not isinstance(app, str) or not re.fullmatch(r"[\w.]+:\w+", app):
        raise ConfigError(f"{path}: its app is MODULE:NAME, got {app!r}")
    return app
