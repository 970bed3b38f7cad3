"""Exports a checkpoint's model as a plain model folder, or its adapter alone."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from agentgym.chat_templates import Renderer, renderer_for
from agentgym.errors import AgentGymError, ConfigError, RunFolderError
from agentgym.loading import is_code_path
from agentgym.model.decoder_config import folder_config
from agentgym.model.language_model import LanguageModel
from agentgym.model.lora_layer import join_adapters
from agentgym.model.model_folder import reading, save_model_folder
from agentgym.model.model_name import is_model_id, model_folder
from agentgym.model.policy import load_policy
from agentgym.remote import is_remote
from agentgym.rollout.record.manifest import MANIFEST
from agentgym.trainers.checkpoints.checkpoint import (
    LEARNER,
    Checkpoint,
    checkpoint_folders,
    copy_tokenizer,
    newest_whole,
    step_of,
)
from agentgym.trainers.checkpoints.run_folder import read_settings
from agentgym.trainers.checkpoints.sharded_state import open_state
from agentgym.trainers.checkpoints.writer import BEST
from agentgym.trainers.learner.lora import Adapters, adapt
from agentgym.trainers.settings.lora import LoraConfig

__all__ = ["DType", "Exported", "export_adapter", "export_model", "find_checkpoint", "write_adapter"]

logger = logging.getLogger(__name__)

DType = Literal["float32", "bfloat16", "float16"]
_KEY = "base_model.model.{}.lora_{}.weight"
"""The name of a matrix in a saved adapter."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export: the folder and the checkpoint that it was made of."""

    folder: Path
    checkpoint: Path
    step: int
    dtype: DType


def find_checkpoint(source: Path, *, step: int | None = None, best: bool = False) -> Checkpoint:
    """Opens a checkpoint's folder, or of a run's folder the newest complete checkpoint, the best, or that of a step.

    Raises RunFolderError for a folder that is neither, ConfigError for a checkpoint that does not exist.
    """
    if not source.is_dir():
        raise RunFolderError(f"there is no folder {str(source)!r}: give a run's folder or one of its checkpoints")
    if source.name == "checkpoints" and (source.parent / "config.yaml").is_file():
        source = source.parent
    if step_folder := _as_checkpoint(source):
        if step is not None or best:
            raise ConfigError(f"{str(source)!r} is a checkpoint already: name the run's folder to choose another one")
        return Checkpoint(step_folder)
    folders = checkpoint_folders(source)
    if not folders:
        raise RunFolderError(f"{str(source)!r} {_what_it_is(source)}: give a run's folder or one of its checkpoints")
    if step is not None and best:
        raise ConfigError("step and best name two checkpoints: give one of them")
    if step is not None:
        matches = [folder for folder in folders if step_of(folder) == step]
        if not matches:
            rest = ", ".join(str(step_of(folder)) for folder in folders)
            raise ConfigError(f"the run in {str(source)!r} has no checkpoint of step {step}; there are those of {rest}")
        return Checkpoint(matches[0])
    if best:
        try:
            return Checkpoint(source / "checkpoints" / (source / "checkpoints" / BEST).read_text().strip())
        except FileNotFoundError:
            raise ConfigError(
                f"the run in {str(source)!r} names no best checkpoint (checkpoint.keep_best): leave best out, or name"
                " a step"
            ) from None
    newest = newest_whole(source)
    assert newest is not None
    return newest


def export_model(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: DType = "float32",
    average: bool = False,
    trust_run_code: bool = False,
) -> Exported:
    """Writes the model and tokenizer without the trainer's state, in the format of `transformers`, SGLang and vLLM.

    With `average`, the weights are the moving average that `learner.ema_decay` kept. Raises RunFolderError if the
    folder is not empty or cannot be written; it appears once it is complete. Raises ConfigError for a run with a class
    of its own, whose file is run only with `trust_run_code`.
    """
    with _new_folder(checkpoint, folder) as part:
        model = load_policy(checkpoint.path, backend=_backend(checkpoint, trust_run_code))
        if average:
            state = checkpoint.learner_state()
            if "lora" in state:
                raise ConfigError("the average of a run with learner.lora is one of its adapter: add --adapter")
            _load_average(model, state, checkpoint)
        else:
            _merge_again(model, checkpoint, trust_run_code)
        save_model_folder(model, part, dtype=getattr(torch, dtype))
        copy_tokenizer(checkpoint.path, part, _renderer(checkpoint))
    return Exported(folder=folder.resolve(), checkpoint=checkpoint.path, step=checkpoint.step, dtype=dtype)


def export_adapter(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: DType = "float32",
    average: bool = False,
    trust_run_code: bool = False,
) -> Exported:
    """Writes the adapter of a run with `learner.lora`, in the format that `peft` loads onto the run's first model.

    Raises ConfigError if all weights were trained, and otherwise as `export_model`.
    """
    whole = checkpoint.learner_state()
    state = whole.get("lora")
    if state is None:
        raise ConfigError(
            f"{str(checkpoint.path)!r} has no adapter: the run trained all weights. Leave adapter out, or train with"
            " learner.lora.rank"
        )
    if average:
        config = _lora_config(state)
        model = adapt(load_policy(checkpoint.path, backend=_backend(checkpoint, trust_run_code)), config)
        _load_average(model, whole, checkpoint)
        state = Adapters(model, config).state_dict()
    with _new_folder(checkpoint, folder) as part:
        write_adapter(state, part, _first_model(checkpoint), getattr(torch, dtype))
    return Exported(folder=folder.resolve(), checkpoint=checkpoint.path, step=checkpoint.step, dtype=dtype)


def write_adapter(state: Mapping[str, Any], folder: Path, base: str | None, dtype: torch.dtype) -> None:
    """Writes a state of `Adapters.state_dict` as a folder that `peft` loads.

    `base` is the folder or name of the model that the adapter belongs to, if it is known.
    """
    settings = state["settings"]
    alpha = float(settings["alpha"])
    alpha = int(alpha) if alpha.is_integer() else alpha
    adapter = _PeftAdapter.of(state["tensors"], state.get("stacks", {}))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings["rank"],
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(adapter.modules),
        "target_parameters": sorted(adapter.parameters) or None,
        "rank_pattern": {name: factor * settings["rank"] for name, factor in adapter.parameters.items() if factor > 1},
        "alpha_pattern": {name: factor * alpha for name, factor in adapter.parameters.items() if factor > 1},
        "bias": "none",
        "fan_in_fan_out": bool(state.get("transposed")),
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class _PeftAdapter:
    """The tensors of an adapter as peft names and joins them, and what they are on."""

    tensors: dict[str, Tensor]
    modules: set[str]
    """The names of the linear layers."""
    parameters: dict[str, int]
    """The ends of the parameters' names, with the number of adapters that are joined into one of a higher rank."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], stacks: Mapping[str, Sequence[str]]) -> _PeftAdapter:
        """Makes it of a state of `Adapters`.

        Experts in one parameter have one adapter in peft, `[K R X, I]` and `[O, K R X]`, and a module with several such
        parameters is wrapped once for each, the first one inside. Layers that are called as a projection of the experts
        are given as parameters, since peft takes their names for those of the experts.
        """
        expert_names = {name for names in stacks.values() for name in names}
        projections = {name.rpartition(".")[2] for name in expert_names}
        plain = {key: tensor for key, tensor in tensors.items() if _layer_of(key) not in expert_names}
        own = {name: name.rpartition(".")[2] for name in map(_layer_of, plain)}
        parameters = {f"{_ending(name, 2)}.weight": 1 for name in own if own[name] in projections}
        adapter = cls(plain, set(own.values()) - projections, parameters)
        owners = [name.rpartition(".")[0] for name in stacks]
        for number, (name, names) in enumerate(stacks.items()):
            owner = owners[number]
            matrices = [(tensors.get(_KEY.format(own, "A")), tensors.get(_KEY.format(own, "B"))) for own in names]
            pairs = [None if low is None or high is None else (low, high) for low, high in matrices]
            left_XOR, right_XRI = join_adapters(pairs)
            wrapper = owner + ".base_layer" * owners[number + 1 :].count(owner)
            adapter.tensors[_KEY.format(wrapper, "A")] = right_XRI.flatten(0, 1)
            adapter.tensors[_KEY.format(wrapper, "B")] = left_XOR.permute(1, 2, 0).flatten(1)
            adapter.parameters[_ending(name, 2)] = sum(pair is not None for pair in pairs)
        return adapter


def _layer_of(key: str) -> str:
    return key.removeprefix("base_model.model.").rpartition(".lora_")[0]


def _ending(name: str, num_parts: int) -> str:
    return ".".join(name.split(".")[-num_parts:])


@torch.no_grad()
def _load_average(model: LanguageModel, state: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Gives the trained parameters of a model their average; raises ConfigError if there is none."""
    average = state["optimizer"].get("average")
    if average is None:
        raise ConfigError(
            f"{str(checkpoint.path)!r} has no average of the weights: leave --ema out, or train with learner.ema_decay"
        )
    parameters = dict(model.named_parameters())
    for name, mean in average.items():
        parameters[name].copy_(mean)


def _backend(checkpoint: Checkpoint, trust_run_code: bool) -> str:
    """Returns the backend of the checkpoint's run, which names the parameters; `auto` for one without its run."""
    run = checkpoint.path.resolve().parent.parent
    backend = str(read_settings(run).get("model_backend", "auto")) if (run / "config.yaml").is_file() else "auto"
    if is_code_path(backend) and not trust_run_code:
        raise ConfigError(
            f"the run's config.yaml names code, model_backend {backend!r}, which would be run to load the model: read"
            " it first, then add --trust-run-code"
        )
    return backend


def _lora_config(state: Mapping[str, Any]) -> LoraConfig:
    return LoraConfig(**{**state["settings"], "target_modules": tuple(state["settings"]["target_modules"])})


def _merge_again(model: LanguageModel, checkpoint: Checkpoint, trust_run_code: bool) -> None:
    """Gives a model in float32 the sum of the base and the adapters of a checkpoint whose weights were rounded.

    Without the base as it was, the weights of the checkpoint stay.
    """
    dtype, state = str(folder_config(checkpoint.path).get("torch_dtype")), open_state(checkpoint.path / LEARNER)
    if dtype == "float32" or "lora" not in state:
        return
    try:
        first = _first_model(checkpoint)
        if first is None:
            raise RunFolderError("the checkpoint is without its run, which names the model that it began with")
        folder, backend = model_folder(first, may_fetch=False), _backend(checkpoint, trust_run_code)
        adapters = Adapters.of(
            model, load_policy(folder, dtype=dtype, backend=backend).float(), _lora_config(state["lora"])
        )
        adapters.load_state_dict(state["lora"])
        adapters.publish()
    except AgentGymError as error:
        logger.warning(
            "the adapters cannot be merged in float32, so the weights are those of the checkpoint, rounded to %s: %s",
            *(dtype, error),
        )


def _renderer(checkpoint: Checkpoint) -> Renderer | None:
    """Returns the renderer of a checkpoint; None for one of the user's own, whose checkpoint has its stop ids."""
    try:
        return renderer_for(checkpoint.path)
    except AgentGymError:
        return None


def _first_model(checkpoint: Checkpoint) -> str | None:
    """Returns the folder of the weights that the checkpoint's run began with; None for a checkpoint without its run."""
    run = checkpoint.path.resolve().parent.parent
    if not (run / "config.yaml").is_file():
        return None
    model = str(read_settings(run).get("model", "embedded"))
    return model if is_model_id(model) or is_remote(model) else str(model_folder(model).resolve())


@contextmanager
def _new_folder(checkpoint: Checkpoint, folder: Path) -> Iterator[Path]:
    """Yields a folder to write in, which is renamed to `folder` at the end; the checkpoint is kept meanwhile."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{str(folder)!r} is taken already: name a new folder, or remove it")
    folder = folder.resolve()
    part = folder.with_name(f".{secrets.token_hex(4)}.{folder.name}")
    try:
        with reading(checkpoint.path):
            part.mkdir(parents=True)
            yield part
            os.replace(part, folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a failed write as RuntimeError
        if isinstance(error, RunFolderError):
            raise
        raise RunFolderError(f"cannot write the model to {str(folder)!r}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _as_checkpoint(source: Path) -> Path | None:
    """Returns the folder if its name or its files mark it as a checkpoint, even a torn one; otherwise None."""
    is_one = source.resolve().parent.name == "checkpoints" or (source / MANIFEST).is_file()
    return source if is_one else None


def _what_it_is(source: Path) -> str:
    if (source / "config.json").is_file():
        return "is a model folder already"
    if (source / "config.yaml").is_file():
        return "is a run without a checkpoint"
    return "holds no run"
