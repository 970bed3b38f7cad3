"""Launches the servers of an engine, each with a port, a secret, a log and its GPUs."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from agentgym.engines.servers.gpus import gpus_of_server
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_process import (
    ServerCommand,
    ServerProcess,
    free_port,
    serving_device,
    start_together,
)

__all__ = ["Launch", "launch_servers"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The parts of a launch in which kinds of server differ."""

    name: str
    """The kind's name in messages and in the names of logs."""
    words: Callable[[int], Sequence[str]]
    """Returns the command of a server that listens on a port."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the server, unless the environment of this process has them."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files that the server imports, by the names of their modules."""


async def launch_servers(config: ServerConfig, launch: Launch, learner: str = "cpu") -> list[ServerProcess]:
    """Starts the servers of a configuration in parallel; all are ended if one does not start.

    The GPU of the `learner`, a device such as `cuda:1`, is taken last. Raises EngineError with the end of the log.
    """
    folder = Path(config.log_folder or mkdtemp(prefix=f"agentgym-{launch.name}-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # Copies under names of their own: a server's environment need not have agentgym, nor see the rest of ours.
    for module, source in launch.files.items():
        shutil.copyfile(source, folder / f"{module}.py")
    env = {name: os.environ.get(name, value) for name, value in launch.env.items()}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    on_cpu = serving_device(config.device) == "cpu"
    processes = []
    for number in range(config.replicas):
        port = free_port()
        command = ServerCommand(
            name=launch.name,
            words=launch.words(port),
            port=port,
            log=folder / f"{launch.name}-{number}.log",
            keeps_log=bool(config.log_folder),
            env=env,
            gpus=() if on_cpu else gpus_of_server(number, config.replicas, learner),
            secret=secrets.token_urlsafe(32),
            ready_s=config.ready_s,
        )
        processes.append(ServerProcess(command))
    await start_together(processes)
    return processes
