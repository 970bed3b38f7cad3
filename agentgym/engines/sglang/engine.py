"""SGLang as the engine: servers that we launch, or that run already, over their native token-id interface."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentgym.engines.servers.launch import launch_servers
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_connection import ServerConnection, connect_servers
from agentgym.engines.servers.server_process import ServerProcess
from agentgym.engines.servers.serving_settings import ServingSettings
from agentgym.engines.sglang.api import SglangTransport
from agentgym.engines.sglang.embedded import CPU_ARGUMENTS, CPU_ENVIRONMENT, EmbeddedSglang
from agentgym.engines.sglang.replica import SglangReplica
from agentgym.errors import ConfigError, EngineError, RunFolderError

__all__ = ["launch_sglang", "open_sglang", "sglang_engine"]

_LAUNCHER = "agentgym_sglang_launch"
SHAPE = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
"""The keys of config.json that determine the shapes of weights."""


async def open_sglang(
    config: ServerConfig, model_folder: Path, *, version: int = 0, learner: str = "cpu"
) -> ReplicatedEngine:
    """Opens the engine of a configuration; its servers are launched or found.

    `model_folder` is loaded by launched servers, and has the vocabulary and the window of either kind. `version` is the
    policy version of the weights that the servers begin with, `learner` the device of this process's learner. Raises
    EngineError if a server does not start or answer (with the end of its log), ConfigError or RunFolderError for what
    cannot be served; nothing is left running.
    """
    model_limits(model_folder)  # before anything is started for it
    if config.embedded:
        arguments = {"dtype": config.weights_dtype, **dict.fromkeys(_sleep_options(config), True), **config.arguments}
        embedded = EmbeddedSglang(model_folder, on_cpu=config.on_cpu, arguments=arguments)
        await embedded.start()
        return await sglang_engine([embedded], config.serving, model_folder=model_folder, version=version)
    launch = partial(launch_sglang, config, model_folder, learner)
    servers = await connect_servers(config, launch, ServerConnection)
    engine = await sglang_engine(servers, config.serving, model_folder=model_folder, version=version)
    engine.processes = [server.process for server in servers if server.process]
    return engine


async def sglang_engine(
    transports: Sequence[SglangTransport], settings: ServingSettings, *, model_folder: Path, version: int = 0
) -> ReplicatedEngine:
    """Opens an engine on running SGLang engines that hold the same weights, those of `model_folder` or later ones.

    Raises EngineError if a transport is not an SGLang engine of a supported release, RunFolderError for a folder
    without a model; all of them are closed then.
    """
    try:
        vocab_size, window = model_limits(model_folder)
        experts = expert_shape(model_folder) if settings.record_experts else None
        replicas = [await SglangReplica.connect(transport, settings, version) for transport in transports]
        for replica in replicas:
            check_shape(replica, model_folder)
            replica.expert_shape = experts
    except BaseException:
        for transport in transports:
            await transport.close()
        raise
    lengths = [window, *(replica.context_window for replica in replicas if replica.context_window)]
    return ReplicatedEngine(replicas, settings, vocab_size=vocab_size, context_window=min(lengths), version=version)


def model_limits(folder: Path) -> tuple[int, int]:
    """Returns the vocabulary size and context window of a model folder; raises RunFolderError if it has neither."""
    config = _text_config(folder)
    try:
        return int(config["vocab_size"]), int(config["max_position_embeddings"])
    except KeyError as error:
        raise RunFolderError(
            f"no model in {str(folder)!r}: config.json with vocab_size is missing ({error})"
        ) from error


def expert_shape(folder: Path) -> tuple[int, int]:
    """Returns the number of layers and of experts of a token; raises ConfigError for a model without experts."""
    config = _text_config(folder)
    if not isinstance(config.get("num_experts_per_tok"), int):
        raise ConfigError("record_experts is for mixtures of experts, and config.json has no num_experts_per_tok")
    return int(config["num_hidden_layers"]), int(config["num_experts_per_tok"])


def _text_config(folder: Path) -> dict[str, Any]:
    """Returns the config.json of a folder, with that of its language part inside it; empty if there is none."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return {**config, **config.get("text_config", {})}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def check_shape(replica: SglangReplica, folder: Path) -> None:
    """Raises EngineError if the server visibly holds a model of another shape: weights that do not fit end it.

    Only a server whose model folder can be read here is checked.
    """
    ours, theirs = (_shape(path) for path in (folder, Path(replica.model_path)))
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            raise EngineError(
                f"{replica.name} serves {replica.model_path!r} with {name} {theirs[name]}, and {str(folder)!r} has"
                f" {ours[name]}: start it with the model that is trained, or name that one with --model"
            )


def _shape(folder: Path) -> dict[str, int]:
    config = _text_config(folder)
    return {name: config[name] for name in SHAPE if isinstance(config.get(name), int)}


def sglang_command(config: ServerConfig, model_folder: Path, port: int) -> list[str]:
    """Returns the command of one server."""
    words = [config.python or sys.executable, "-m", _LAUNCHER]
    words += ["--model-path", str(model_folder), "--dtype", config.weights_dtype, "--host", "127.0.0.1"]
    words += ["--port", str(port)]
    words += ["--skip-server-warmup", "--log-level", "warning"]
    for name, value in CPU_ARGUMENTS.items() if config.on_cpu else ():
        option = f"--{name.replace('_', '-')}"
        words.append(option if value is True else f"{option}={value}")
    words += ["--enable-return-routed-experts"] if config.serving.record_experts else []
    words += [f"--{name.replace('_', '-')}" for name in _sleep_options(config)]
    return [*words, *config.server_args]


def _sleep_options(config: ServerConfig) -> Sequence[str]:
    """The options of a server that can free a GPU's memory and take it back."""
    return ("enable_memory_saver", "enable_weights_cpu_backup") if config.sleeps else ()


async def launch_sglang(config: ServerConfig, model_folder: Path, learner: str = "cpu") -> list[ServerProcess]:
    """Starts the servers of a configuration, as `launch_servers` does."""
    env = CPU_ENVIRONMENT if config.on_cpu else {}
    files = {_LAUNCHER: Path(__file__).with_name("launcher.py")}
    words = partial(sglang_command, config, model_folder)
    return await launch_servers(config, "sglang", words, env=env, files=files, learner=learner)
