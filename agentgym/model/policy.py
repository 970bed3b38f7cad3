"""Loads the model of a folder: with the fast decoder where it computes the architecture, else with transformers."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from agentgym.errors import AgentGymError, ConfigError, RunFolderError
from agentgym.loading import is_code_path
from agentgym.model.architectures import check_backend, refusal
from agentgym.model.decoder_config import folder_config
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_class import class_of_model, first_line, load_fault
from agentgym.model.model_folder import empty_decoder, load_decoder, on_device, reading
from agentgym.model.pass_attention import HOOK, register_hook
from agentgym.model.rope import short_rope_length
from agentgym.model.transformers_folder import load_transformers_model
from agentgym.model.transformers_model import TransformersModel

__all__ = ["backend_line", "empty_policy", "is_fast", "load_policy", "load_policy_on"]


def load_policy(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | str = torch.float32, backend: str = "auto"
) -> LanguageModel:
    """Loads the model of a folder in a type, such as `torch.bfloat16` or its name.

    `backend` is `auto`, `fast`, `transformers`, or a class of transformers' kind by its place, `path/to/file.py:Class`.

    Raises RunFolderError for a folder without a whole model, ConfigError for a model that cannot be computed.
    """
    check_backend(backend)
    path, dtype = Path(folder), getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if is_fast(path, backend):
        return load_decoder(path, dtype=dtype)
    with reading(path):
        model = load_transformers_model(path, dtype=dtype, own=backend if is_code_path(backend) else None)
        if is_code_path(backend):
            _check_attention(model)
        return model


def load_policy_on(
    device: str, folder: str | os.PathLike[str], *, dtype: str = "auto", backend: str = "auto"
) -> LanguageModel:
    """Loads the model of a folder onto a device, as `load_policy` does; `auto` is bfloat16 on a GPU, else float32.

    Raises ConfigError if the device is not available too.
    """
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return on_device(load_policy(folder, dtype=dtype, backend=backend), device)


def empty_policy(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | str = torch.float32, backend: str = "auto"
) -> LanguageModel:
    """Returns the model of a folder as `load_policy` does, but on the meta device: with its sizes, without weights."""
    check_backend(backend)
    path, dtype = Path(folder), getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if is_fast(path, backend):
        return empty_decoder(path, dtype=dtype)
    return _empty_transformers_model(path, dtype, backend if is_code_path(backend) else None)


def _empty_transformers_model(path: Path, dtype: torch.dtype, own: str | None) -> TransformersModel:
    register_hook()
    try:
        config, kind = class_of_model(path, own)
        build = kind.from_config if own is None else kind._from_config
        with torch.device("meta"):
            hf = build(config, dtype=dtype, attn_implementation=HOOK)
    except AgentGymError:
        raise
    except OSError as error:
        raise RunFolderError(f"no model can be read from {str(path)!r}: {first_line(error)}") from error
    except Exception as error:  # the boundary: each architecture refuses settings in its own way
        raise load_fault(own, f"cannot make the model in {str(path)!r}", error) from error
    return TransformersModel(hf, folder_config(path))


def _check_attention(model: TransformersModel) -> None:
    """Raises ConfigError if some layers of a user's class attend without the interface that the engine replaces."""
    num_found = len(model.attending_layers)
    if model.packs and num_found != model.num_layers:
        raise ConfigError(
            f"{num_found} of {model.num_layers} layers of {type(model.hf).__name__} attend through transformers'"
            " AttentionInterface, as those of its own classes do, and without it nothing is sampled"
        )


def is_fast(folder: str | os.PathLike[str], backend: str) -> bool:
    """True if the fast decoder is to compute the model of a folder; raises RunFolderError if there is none."""
    return backend == "fast" or (backend == "auto" and _reason(Path(folder)) is None)


def backend_line(model: LanguageModel, folder: str | os.PathLike[str]) -> str | None:
    """Returns a line that says why a model is computed by transformers and what that costs; None for the decoder."""
    if not isinstance(model, TransformersModel):
        return None
    kind = type(model.hf)
    own = "" if kind.__module__.startswith("transformers.") else f"its class is {kind.__name__}"
    reason = own or _reason(Path(folder)) or "model_backend is transformers"
    rows = "" if model.packs else "; it keeps a state, so rows are not packed and prefixes are not shared"
    if (length := short_rope_length(folder_config(Path(folder)))) is not None:
        rows += f"; its rotary embeddings change beyond {length:,} tokens (longrope), so an episode ends there"
    return f"the model is computed by transformers ({reason}){rows}"


def _reason(path: Path) -> str | None:
    """Returns why the fast decoder does not compute the model of a folder, or None if it does."""
    return refusal(folder_config(path))
