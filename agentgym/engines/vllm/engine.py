"""vLLM as the engine: servers that we launch, or that run already, over their token-in, token-out interface."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

from agentgym.engines.servers.gpus import gpus_of_server
from agentgym.engines.servers.http import SERVER_SECRET
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_process import (
    ServerCommand,
    ServerProcess,
    free_port,
    serving_device,
    start_together,
)
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.engines.vllm.api import VllmTransport
from agentgym.engines.vllm.embedded import CPU_ENVIRONMENT, EmbeddedVllm
from agentgym.engines.vllm.replica import VllmReplica
from agentgym.engines.vllm.server import VllmServer
from agentgym.errors import ConfigError, RunFolderError

__all__ = ["VllmConfig", "launch_vllm", "open_vllm", "vllm_engine"]

_WORDS = (
    "--enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm "
    "--worker-extension-cls agentgym_vllm_worker_extension.WeightWorker --middleware agentgym_vllm_auth.RequireSecret"
).split()
# On CPU a seeded request ends the server if its prompt is read in chunks, and half of the memory is taken by default.
_CPU_WORDS = "--enforce-eager --no-enable-chunked-prefill --gpu-memory-utilization 0.2".split()
_ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, kw_only=True)
class VllmConfig(ServerConfig):
    """The vLLM servers that sample: those of `urls`, or `replicas` new ones that end with the engine."""

    server: ClassVar[str] = "a vLLM server"
    urls: tuple[str, ...] = ()
    """Running servers, such as http://127.0.0.1:8000; none launches new ones. They need VLLM_SERVER_DEV_MODE=1,
    --enable-scale-out, --logprobs-mode processed_logprobs and our --worker-extension-cls, as the error says. Each
    request sends the variable AGENTGYM_SERVER_SECRET as a bearer token, if it is set."""
    python: str = ""
    """The interpreter that has vLLM (0.32 or later); empty is the one that runs agentgym."""
    server_args: tuple[str, ...] = ()
    """Further arguments of `vllm.entrypoints.openai.api_server`, or of `AsyncEngineArgs` if embedded, all in
    one pair of quotation marks."""


async def open_vllm(
    config: VllmConfig, model_folder: Path | None, *, version: int = 0, learner: str = "cpu"
) -> ReplicatedEngine:
    """Opens the engine of a configuration; its servers are launched or found.

    `model_folder` is loaded by launched servers (None if `urls` are given). `version` is the policy version of the
    weights that the servers begin with, `learner` the device of this process's learner. Raises EngineError if a server
    does not start or answer (with the end of its log), RunFolderError for a folder without a model, ConfigError for an
    embedded engine whose library is not installed here; nothing is left running.
    """
    if config.embedded:
        if model_folder is None:
            raise ConfigError("an embedded engine needs a model folder")
        arguments = {"dtype": config.weights_dtype, "enable_sleep_mode": _sleeps(config), **config.arguments}
        llm = EmbeddedVllm(model_folder, on_cpu=serving_device(config.device) == "cpu", arguments=arguments)
        return await vllm_engine([llm], config.serving, version=version)
    servers: list[VllmServer] = []
    if config.urls:
        servers = [_server(config, url, secret=os.environ.get(SERVER_SECRET, "")) for url in config.urls]
    else:
        launched = await launch_vllm(config, model_folder, learner)
        servers = [_server(config, process.url, process, secret=process.command.secret) for process in launched]
    return await vllm_engine(servers, config.serving, version=version)


async def vllm_engine(
    transports: Sequence[VllmTransport], settings: ServingSettings, *, version: int = 0
) -> ReplicatedEngine:
    """Opens an engine on running vLLM engines that hold the same weights.

    Raises EngineError if a transport is not a vLLM engine, or lacks our worker extension; all of them are closed then.
    """
    try:
        replicas = [await VllmReplica.connect(transport, settings, version) for transport in transports]
        windows = [await transport.context_window() for transport in transports]
        return ReplicatedEngine(
            replicas,
            settings,
            vocab_size=min(replica.sync.layout.vocab_size for replica in replicas),
            context_window=min(windows),
            version=version,
        )
    except BaseException:
        for transport in transports:
            await transport.close()
        raise


async def launch_vllm(config: VllmConfig, model_folder: Path | None, learner: str = "cpu") -> list[ServerProcess]:
    """Starts the servers of a configuration in parallel; all are ended if one does not start.

    The GPU of the `learner` is taken last.
    Raises EngineError with the end of its log, RunFolderError for a folder without a model.
    """
    if model_folder is None or not (model_folder / "config.json").is_file():
        raise RunFolderError(f"no model in {str(model_folder)!r}: config.json is missing")
    folder = Path(config.log_folder or mkdtemp(prefix="agentgym-vllm-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # Copies under names of their own: vLLM's environment need not have agentgym, nor see the rest of ours.
    for name in ("worker_extension", "auth"):
        shutil.copyfile(Path(__file__).with_name(f"{name}.py"), folder / f"agentgym_vllm_{name}.py")
    commands = [_command(config, model_folder, folder, number) for number in range(config.replicas)]
    if serving_device(config.device) != "cpu":
        every = [gpus_of_server(number, config.replicas, learner) for number in range(config.replicas)]
        commands = [replace(command, gpus=gpus) for command, gpus in zip(commands, every, strict=True)]
    processes = [ServerProcess(command) for command in commands]
    await start_together(processes, "--vllm.python")
    return processes


def vllm_command(config: VllmConfig, model_folder: Path, port: int) -> list[str]:
    """Returns the command of one server."""
    words = [config.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(model_folder), "--port", str(port), "--host", "127.0.0.1", "--dtype", config.weights_dtype]
    words += ["--uvicorn-log-level", "warning", *_WORDS]
    words += _CPU_WORDS if serving_device(config.device) == "cpu" else []
    words += ["--enable-sleep-mode"] if _sleeps(config) else []
    return [*words, *config.server_args]


def _sleeps(config: VllmConfig) -> bool:
    return config.serving.sleep and serving_device(config.device) == "cuda"


def _server(config: VllmConfig, url: str, process: ServerProcess | None = None, *, secret: str) -> VllmServer:
    serving = config.serving
    return VllmServer(
        url,
        process=process,
        secret=secret,
        request_s=serving.request_s,
        order_s=serving.update_s,
        stream=serving.stream,
    )


def _command(config: VllmConfig, model_folder: Path, folder: Path, number: int) -> ServerCommand:
    port = free_port()
    on_cpu = serving_device(config.device) == "cpu"
    env = {**_ENV, **(CPU_ENVIRONMENT if on_cpu else {})}
    env = {name: os.environ.get(name, value) for name, value in env.items()}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ServerCommand(
        name="vllm",
        words=vllm_command(config, model_folder, port),
        port=port,
        log=folder / f"vllm-{number}.log",
        keeps_log=bool(config.log_folder),
        env=env,
        secret=secrets.token_urlsafe(32),
        ready_s=config.ready_s,
    )
