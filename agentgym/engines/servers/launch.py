"""Launches the servers of an engine, each with a port, a secret, a log and its GPUs."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp

from agentgym.engines.servers.gpus import gpus_of_server
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_process import (
    ServerCommand,
    ServerProcess,
    free_port,
    start_together,
)

__all__ = ["launch_servers"]


async def launch_servers(
    config: ServerConfig,
    name: str,
    words: Callable[[int], Sequence[str]],
    *,
    env: Mapping[str, str],
    files: Mapping[str, Path],
    learner: str = "cpu",
) -> list[ServerProcess]:
    """Starts the servers of a configuration in parallel; all are ended if one does not start.

    `name` is that of the kind, in messages and of logs; `words` returns the command of a server that listens on a port.
    `env` are variables of the server, unless the environment of this process has them, and `files` the files that it
    imports, by the names of their modules. The GPU of the `learner`, a device such as `cuda:1`, is taken last. Raises
    EngineError with the end of the log.
    """
    folder = Path(config.log_folder or mkdtemp(prefix=f"agentgym-{name}-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # Copies under names of their own: a server's environment need not have agentgym, nor see the rest of ours.
    for module, source in files.items():
        shutil.copyfile(source, folder / f"{module}.py")
    variables = {variable: os.environ.get(variable, value) for variable, value in env.items()}
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = []
    for number in range(config.replicas):
        port = free_port()
        command = ServerCommand(
            name=name,
            words=words(port),
            port=port,
            log=folder / f"{name}-{number}.log",
            keeps_log=bool(config.log_folder),
            env=variables,
            gpus=() if config.on_cpu else gpus_of_server(number, config.replicas, learner),
            secret=secrets.token_urlsafe(32),
            ready_s=config.ready_s,
        )
        processes.append(ServerProcess(command))
    await start_together(processes)
    return processes
