"""Decoders to and from model folders, under the parameter names that `transformers` publishes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentgym.engines.hf_model import Decoder, DecoderConfig, DecoderLayer
from agentgym.engines.protocol import LoraWeights, Weights
from agentgym.errors import ConfigError, EngineError, RunFolderError

__all__ = [
    "hf_named_views",
    "is_read",
    "load_decoder",
    "model_tensors",
    "on_device",
    "own_tensors",
    "reading",
    "save_decoder",
    "write_model",
]

LOCKED = "config.json"
"""The file of a model folder that bears the lock of whoever reads it."""


def hf_named_views(
    model: Decoder, whole: Callable[[Tensor], Tensor] = lambda parameter: parameter
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its published name, as a view of the model's own memory, or of what `whole` makes of each
    parameter in its turn."""
    yield "model.embed_tokens.weight", whole(model.embed)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        yield from _layer_views(f"model.layers.{index}.", layer, whole)
    yield "model.norm.weight", whole(model.final_norm)
    if model.head is not None:
        yield "lm_head.weight", whole(model.head)


def _layer_views(prefix: str, layer: DecoderLayer, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    sizes = [layer.q_width, layer.kv_width, layer.kv_width]
    yield prefix + "input_layernorm.weight", whole(layer.input_norm)
    for name, part in zip("qkv", whole(layer.qkv).split(sizes), strict=True):
        yield f"{prefix}self_attn.{name}_proj.weight", part
    if layer.qkv_bias is not None:
        for name, part in zip("qkv", whole(layer.qkv_bias).split(sizes), strict=True):
            yield f"{prefix}self_attn.{name}_proj.bias", part
    if layer.q_norm is not None and layer.k_norm is not None:
        yield prefix + "self_attn.q_norm.weight", whole(layer.q_norm)
        yield prefix + "self_attn.k_norm.weight", whole(layer.k_norm)
    yield prefix + "self_attn.o_proj.weight", whole(layer.out)
    yield prefix + "post_attention_layernorm.weight", whole(layer.ffn_norm)
    for name, part in zip(("gate", "up"), whole(layer.gate_up).chunk(2), strict=True):
        yield f"{prefix}mlp.{name}_proj.weight", part
    yield prefix + "mlp.down_proj.weight", whole(layer.down)


def own_tensors(model: Decoder, weights: Weights) -> list[tuple[Tensor, Tensor]]:
    """Each of the model's tensors with the one that takes its place; none for no weights. Raises EngineError for
    weights that are not all of this model's."""
    if isinstance(weights, LoraWeights):
        raise EngineError("the hf engine takes no adapter alone: give it the merged weights")
    wanted, given = dict(hf_named_views(model)), dict(weights)
    if not given:
        return []
    if odd := sorted(wanted.keys() ^ given.keys()):
        raise EngineError(f"weights of another model: {len(odd)} tensors are of one alone, the first is {odd[0]!r}")
    pairs = []
    for name, own in wanted.items():
        new = given[name]
        if not isinstance(new, Tensor) or new.shape != own.shape:
            raise EngineError(f"a tensor of shape {tuple(own.shape)} was wanted as {name!r}, got {new!r:.100}")
        pairs.append((own, new))
    return pairs


def load_decoder(folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Loads a model folder (`config.json` and safetensors, sharded or not); raises RunFolderError naming what lacks."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise RunFolderError(f"no model in {str(path)!r}: it needs a config.json and safetensors; give a model folder")
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise RunFolderError(f"model folder {str(path)!r} holds no .safetensors file; save the model in that format")
    with reading(path):
        return _load(path, shards, dtype)


def on_device(model: Decoder, device: str) -> Decoder:
    """The model, moved; raises ConfigError for a device that is not there."""
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch's words for it
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {device!r} cannot be used ({reason}); a model runs on cpu everywhere") from error


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """While it lasts, no run deletes the model folder, should it be one of its checkpoints."""
    with open(folder / LOCKED, "rb") as file:
        with suppress(
            OSError
        ):  # a file system without locks: there a run cannot tell, and keeps what it may not delete
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_read(folder: Path) -> bool:
    """Whether somebody, in this process or another, is `reading` it; true where the file system cannot tell."""
    try:
        with open(folder / LOCKED, "rb+") as file:  # for writing: a network file system locks nothing else
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _load(path: Path, shards: Sequence[Path], dtype: torch.dtype) -> Decoder:
    model = Decoder(DecoderConfig.from_hf(json.loads((path / "config.json").read_text()))).to(dtype)
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        try:
            tensors.update(load_file(shard))
        except SafetensorError as error:
            raise RunFolderError(f"{str(shard)!r} is torn or not a safetensors file: {error}") from error
    wanted = dict(hf_named_views(model))
    tensors = {name: tensor for name, tensor in tensors.items() if name in wanted or name != "lm_head.weight"}
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise RunFolderError(f"{str(path)!r} lacks {len(missing)} tensors, the first is {missing[0]!r}")
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise RunFolderError(f"{str(path)!r} holds {len(unknown)} tensors of no known use, the first is {unknown[0]!r}")
    with torch.no_grad():
        for name, view in wanted.items():
            if view.shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)}, config.json says {tuple(view.shape)}"
                raise RunFolderError(f"tensor {name!r} of {str(path)!r} has shape {shapes}")
            view.copy_(tensors[name])
    return model


def model_tensors(model: Decoder, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """A copy of every parameter under its published name, on the CPU: what the model becomes later does not show."""
    return {
        name: view.detach().to("cpu", dtype or view.dtype, copy=True, memory_format=torch.contiguous_format)
        for name, view in hf_named_views(model)
    }


def write_model(config: DecoderConfig, tensors: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Writes `config.json`, with the dtype of the tensors, and `model.safetensors`; `transformers`' `from_pretrained`
    reads the folder."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    dtype = next(iter(tensors.values())).dtype
    settings = config.to_hf() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})


def save_decoder(model: Decoder, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
    """Writes the model as `write_model` does, in its own dtype or another one."""
    write_model(model.config, model_tensors(model, dtype=dtype), folder)
