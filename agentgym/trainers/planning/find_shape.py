"""Finds the shape of the model that a user names."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError, nearest
from agentgym.model.architectures import refusal
from agentgym.model.decoder_config import DecoderConfig
from agentgym.model.model_name import is_model_id, model_folder
from agentgym.remote import is_remote
from agentgym.trainers.planning.shapes import SHAPES, ModelShape

__all__ = ["shape_of"]


def shape_of(model: str) -> ModelShape:
    """Returns the shape of a name in `SHAPES`, a size, `embedded`, or a folder with a config.json.

    A size is the first shape of that size (`8B` is Qwen3-8B). Raises ConfigError for any other name.
    """
    wanted = model.rsplit("/", 1)[-1].lower()
    for name, shape in SHAPES.items():
        if wanted in (name.lower(), _size_of(name).lower()):
            return shape
    folder = embedded_folder() if model == "embedded" else Path(model)
    if is_model_id(model) or is_remote(model):
        folder = model_folder(model)
    if folder.is_dir():
        return _of_folder(folder)
    sizes = [_size_of(name) for name in SHAPES]
    hint = nearest(model, [*SHAPES, *sizes, "embedded"]) or ""
    raise ConfigError(
        f"unknown model {model!r}{hint or '.'} A size ({', '.join(dict.fromkeys(sizes))}), a name such as Llama-3.1-8B,"
        " `embedded` or a folder with a config.json was wanted"
    )


def _size_of(name: str) -> str:
    """Returns the size in a name: `8B` of Qwen3-8B and of Llama-3.1-8B, `30B-A3B` of Qwen3-30B-A3B."""
    *_, size, active = name.split("-")
    return f"{size}-{active}" if active.startswith("A") else active


def _of_folder(folder: Path) -> ModelShape:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a model's configuration: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{str(path)!r} holds no configuration: it must be a JSON object")
    reason = refusal(config)
    if reason is None:
        return _of_decoder(folder.name, DecoderConfig.from_hf(config))
    from agentgym.trainers.planning.counted_shape import counted_shape  # here, because it needs torch

    return counted_shape(folder, reason)


def _of_decoder(name: str, config: DecoderConfig) -> ModelShape:
    return ModelShape(
        name=name,
        **{field.name: getattr(config, field.name) for field in fields(ModelShape) if hasattr(config, field.name)},
    )
