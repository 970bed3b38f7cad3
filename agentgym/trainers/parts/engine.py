"""The engine that a training run samples with, and how new weights reach it."""

from __future__ import annotations

import copy
import inspect
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.kv_cache import fitting_slots
from agentgym.engines.protocol import Completion, Engine, Sampling, WeightSync
from agentgym.engines.server_kind import SERVERS
from agentgym.engines.servers.gpus import has_gpu_of_its_own
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerLaunch
from agentgym.engines.servers.serving_settings import EngineServing
from agentgym.errors import ConfigError, EngineError
from agentgym.loading import Wanted, is_code_path, load_named
from agentgym.model.architectures import quantization
from agentgym.model.decoder import Decoder
from agentgym.model.decoder_config import folder_config
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import on_device, published_views
from agentgym.model.policy import empty_policy, load_policy
from agentgym.model.published_weights import Weights
from agentgym.settings.functions import convert_function_errors
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.pass_tokens import fitting_tokens
from agentgym.trainers.parallel.learner_ranks import is_large
from agentgym.trainers.settings.router import RouterConfig

__all__ = [
    "IdleEngine",
    "check_model_settings",
    "engine_window",
    "learner_bytes",
    "load_model",
    "model_of_run",
    "open_engine",
    "open_servers",
    "require_engine",
    "weights_for",
]

OWN_ENGINE = Wanted(
    noun="engine",
    example="function",
    hint="It takes (model, folder, version) and returns an agentgym.engines.protocol.Engine.",
)


def load_model(folder: Path, config: TrainConfig) -> LanguageModel:
    """The model of a folder, on the device and in the type of the learner; raises ConfigError for a missing device."""
    learner = config.learner
    model = load_policy(folder, dtype=getattr(torch, learner.compute_dtype), backend=config.model_backend)
    return on_device(model, learner.device)


def model_of_run(folder: Path, config: TrainConfig) -> LanguageModel:
    """The model of a folder in the process of a run: without weights if ranks on a cluster have them."""
    if config.executor != "ray":
        return load_model(folder, config)
    return empty_policy(folder, dtype=config.learner.compute_dtype, backend=config.model_backend)


def check_model_settings(model: LanguageModel, config: TrainConfig) -> None:
    """Raises ConfigError for settings that the model, or one computed by transformers, cannot satisfy."""
    if config.learner.router != RouterConfig() and not model.routers:
        raise ConfigError("learner.router is for mixtures of experts, and the model has no router: leave it out")
    if model.routers and config.on_servers and (reason := SERVERS[config.engine].refuses_experts):
        raise ConfigError(reason)
    if isinstance(model, Decoder):
        return
    learner = config.learner
    if learner.head_kernel == "liger" and model.softcap is not None:
        raise ConfigError("learner.head_kernel liger does not cap logits as this model does: leave it out")


def engine_window(config: TrainConfig, model: LanguageModel) -> int:
    """The tokens of a slot of the in-process engine: those of an episode's row, or of the model if that is unlimited.

    A model's window may be forty times as long, and a GPU reserves memory for all of it.
    """
    return min(config.limits.context_window or model.context_window, model.context_window)


def local_settings(config: TrainConfig, model: LanguageModel) -> LocalEngineConfig:
    """The settings of a run's in-process engine: the experts that its learner replays are recorded."""
    return LocalEngineConfig(
        **asdict(config.local), window=engine_window(config, model), record_experts=config.learner.router.replay
    )


async def open_engine(
    config: TrainConfig, model: LanguageModel, model_folder: Path, *, version: int, log_folder: Path
) -> Engine:
    """Opens the engine of a run.

    In process it samples from the model itself, or from a copy if it goes on while the model is trained. Servers load
    `model_folder` and keep their logs in `log_folder`; their weights are those of the folder until the first update.
    """
    if not config.plays:
        return IdleEngine(model)
    if config.engine == "local":
        sampled = copy.deepcopy(model).requires_grad_(False) if config.max_staleness else model
        settings = local_settings(config, model)
        if settings.num_slots is None:
            records, room = settings.record_experts, learner_bytes(config, model)
            num_slots = fitting_slots(model, engine_window(config, model), record_experts=records, reserve_bytes=room)
            settings = replace(settings, num_slots=num_slots)
        return LocalEngine(sampled, settings, version=version)
    if is_code_path(config.engine):
        return await _load_custom_engine(config.engine, model, model_folder, version)
    return await open_servers(config, model_folder, version=version, log_folder=log_folder)


def learner_bytes(config: TrainConfig, model: LanguageModel) -> int:
    """Returns the bytes that the learner of this process takes later: gradients, optimizer, copies of the model."""
    learner, size = config.learner, model.num_parameters
    weights = sum(parameter.nbytes for parameter in model.parameters())
    copies = weights if learner.needs_first_weights and not config.adapts_in_place else 0
    if learner.lora.rank:  # adapters are small beside the base
        return copies
    masters = 4 * size if learner.compute_dtype == "bfloat16" else 0
    return copies + masters + _OPTIMIZER_BYTES * size


def with_pass_tokens(config: TrainConfig, model: LanguageModel) -> TrainConfig:
    """Returns the run with the tokens of a forward pass, which the GPU of this process has memory for.

    Those of a large model on a CPU are left open: each batch has its own.
    """
    learner, reserve, share = config.learner, float(learner_bytes(config, model)), 1.0
    chosen_by_batch = is_large(model) and model.embed.device.type == "cpu"
    if learner.micro_batch_tokens is not None or config.executor == "ray" or chosen_by_batch:
        return config
    if config.on_servers:
        reserve += _SHARED_GPU * _gpu_memory(model) if not config.servers_sleep else 0.0
    elif config.plays:
        share = 0.5  # the engine in process takes as much for keys and values
    tokens = fitting_tokens(model, recomputes=learner.activation_checkpointing, reserve_bytes=reserve, share=share)
    return replace(config, learner=replace(learner, micro_batch_tokens=tokens))


def _gpu_memory(model: LanguageModel) -> int:
    device = model.embed.device
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0


_OPTIMIZER_BYTES = 12
"""The bytes for each weight of a gradient and of AdamW's two moments in float32."""


async def _load_custom_engine(place: str, model: LanguageModel, model_folder: Path, version: int) -> Engine:
    """The engine that a user's function makes, at once or as a coroutine; raises ConfigError for something else."""
    make = load_named(place, OWN_ENGINE)
    if not callable(make):
        raise ConfigError(f"{place!r} is not a function that makes an engine. {OWN_ENGINE.hint}")
    with convert_function_errors(place, make):
        result = make(model, model_folder, version)
        engine: object = await result if inspect.isawaitable(result) else result
    if not isinstance(engine, Engine):
        raise ConfigError(f"{place!r} returns a {type(engine).__name__}, no engine. {OWN_ENGINE.hint}")
    return engine


async def open_servers(config: TrainConfig, model_folder: Path, *, version: int, log_folder: Path) -> ReplicatedEngine:
    """Opens the engine of a run that samples on servers; raises ConfigError for a folder with quantized weights."""
    if method := quantization(folder_config(model_folder)):
        raise ConfigError(
            f"{str(model_folder)!r} has quantized weights ({method}), which a server would keep: sample with --engine"
            " local, or give a model in bfloat16"
        )
    server, learner = config.server, config.learner
    own = {
        "dtype": learner.compute_dtype if server.dtype == "auto" else server.dtype,
        "server_args": _server_args(config),
        "serving": EngineServing.of(server.serving, record_experts=learner.router.replay),
    }
    launch = ServerLaunch(**{**vars(server), **own, "log_folder": str(log_folder)})
    return await SERVERS[config.engine].open(launch, model_folder, version=version, learner=learner.device)


def require_engine(config: TrainConfig) -> None:
    """Raises for an own engine that does not exist, or servers whose interpreter does not have their library."""
    if is_code_path(config.engine):
        load_named(config.engine, OWN_ENGINE)
        return
    library = SERVERS[config.engine].library if config.on_servers else ""
    if not library or config.server.urls:
        return
    python = config.server.python or sys.executable
    search = f"import importlib.util as u; raise SystemExit(u.find_spec({library!r}) is None)"
    if shutil.which(python) is None or subprocess.run([python, "-c", search], capture_output=True).returncode:
        raise ConfigError(
            f"{python!r} is not an interpreter with {library}: name one with --server.python, or servers with"
            " --server.urls (`agentgym doctor` shows how to install it)"
        )


_SEVERAL_GPUS = ("--tp", "--tensor-parallel", "--pp", "--pipeline-parallel", "--dp", "--data-parallel")
_SHARED_GPU = 0.4
"""The share of the learner's GPU for a server on it, which takes up to 0.9 of a GPU by default."""


def _server_args(config: TrainConfig) -> tuple[str, ...]:
    """Returns the arguments of a server, which leaves memory to a learner on the same GPU unless they say otherwise."""
    server, option = config.server, SERVERS[config.engine].options.get("memory_share")
    if option is None or server.urls or server.on_cpu:
        return server.server_args
    learner, shares = config.learner.device, config.ray.layout == "colocated"
    if learner.startswith("cuda"):  # a server of several GPUs may take the learner's too
        shares = any(word.startswith(_SEVERAL_GPUS) for word in server.server_args)
        shares = shares or not has_gpu_of_its_own(server.replicas, learner)
    return (f"{option}={_SHARED_GPU}", *server.server_args) if shares else server.server_args


class IdleEngine:
    """The `Engine` of a lesson that plays nothing."""

    def __init__(self, model: LanguageModel) -> None:
        self.vocab_size, self.context_window = model.vocab_size, model.context_window

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Raises EngineError."""
        raise EngineError("a lesson without held-out tasks samples nothing")

    async def update_weights(self, weights: Weights, version: int) -> WeightSync:
        """Keeps nothing."""
        return WeightSync(version=version)

    async def pause(self) -> None:
        """Does nothing, like all below."""

    resume = close = pause

    async def abort(self, session: str) -> None:
        """Does nothing."""


def weights_for(engine: Engine, model: LanguageModel) -> Weights:
    """The weights for `update_weights` of this engine; empty if it samples from the model itself."""
    is_shared = isinstance(engine, LocalEngine) and engine.model is model
    return {} if is_shared else dict(published_views(model))
