"""vLLM as the engine: servers that we launch, or that run already, over their token-in, token-out interface."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from agentgym.engines.servers.launch import launch_servers
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_connection import connect_servers
from agentgym.engines.servers.server_process import ServerProcess
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.engines.vllm.api import VllmTransport
from agentgym.engines.vllm.embedded import CPU_ENVIRONMENT, EmbeddedVllm
from agentgym.engines.vllm.replica import VllmReplica
from agentgym.engines.vllm.server import VllmServer
from agentgym.errors import ConfigError, RunFolderError

__all__ = ["launch_vllm", "open_vllm", "vllm_engine"]

_WORDS = (
    "--enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm "
    "--worker-extension-cls agentgym_vllm_worker_extension.WeightWorker --middleware agentgym_vllm_auth.RequireSecret"
).split()
# On CPU a seeded request ends the server if its prompt is read in chunks, and half of the memory is taken by default.
_CPU_WORDS = "--enforce-eager --no-enable-chunked-prefill --gpu-memory-utilization 0.2".split()
_ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


async def open_vllm(
    config: ServerConfig, model_folder: Path | None, *, version: int = 0, learner: str = "cpu"
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
        arguments = {"dtype": config.weights_dtype, "enable_sleep_mode": config.sleeps, **config.arguments}
        llm = EmbeddedVllm(model_folder, on_cpu=config.on_cpu, arguments=arguments)
        return await vllm_engine([llm], config.serving, version=version)
    connect = partial(VllmServer, request_s=config.serving.request_s, stream=config.serving.stream)
    servers = await connect_servers(config, partial(launch_vllm, config, model_folder, learner), connect)
    engine = await vllm_engine(servers, config.serving, version=version)
    engine.processes = [server.process for server in servers if server.process]
    return engine


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


async def launch_vllm(config: ServerConfig, model_folder: Path | None, learner: str = "cpu") -> list[ServerProcess]:
    """Starts the servers of a configuration, as `launch_servers` does.

    Raises RunFolderError for a folder without a model.
    """
    if model_folder is None or not (model_folder / "config.json").is_file():
        raise RunFolderError(f"no model in {str(model_folder)!r}: config.json is missing")
    env = {**_ENV, **(CPU_ENVIRONMENT if config.on_cpu else {})}
    files = {f"agentgym_vllm_{name}": Path(__file__).with_name(f"{name}.py") for name in ("worker_extension", "auth")}
    words = partial(vllm_command, config, model_folder)
    return await launch_servers(config, "vllm", words, env=env, files=files, learner=learner)


def vllm_command(config: ServerConfig, model_folder: Path, port: int) -> list[str]:
    """Returns the command of one server."""
    words = [config.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(model_folder), "--port", str(port), "--host", "127.0.0.1", "--dtype", config.weights_dtype]
    words += ["--uvicorn-log-level", "warning", *_WORDS]
    words += _CPU_WORDS if config.on_cpu else []
    words += ["--enable-sleep-mode"] if config.sleeps else []
    return [*words, *config.server_args]
