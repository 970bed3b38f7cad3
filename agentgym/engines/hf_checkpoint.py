"""Decoders to and from model folders, under the parameter names that `transformers` publishes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentgym.engines.hf_model import Decoder, DecoderConfig, DecoderLayer
from agentgym.errors import RunFolderError

__all__ = ["hf_named_views", "load_decoder", "save_decoder"]


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


def load_decoder(folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Loads a model folder (`config.json` and safetensors, sharded or not); raises RunFolderError naming what lacks."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise RunFolderError(f"no model in {str(path)!r}: it needs a config.json and safetensors; give a model folder")
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise RunFolderError(f"model folder {str(path)!r} holds no .safetensors file; save the model in that format")
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


def save_decoder(model: Decoder, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
    """Writes `config.json` and `model.safetensors`; `transformers`' `from_pretrained` reads the folder."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = model.config.to_hf()
    if dtype is not None:
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    views = hf_named_views(model)
    tensors = {name: view.detach().to(dtype or view.dtype).contiguous().clone() for name, view in views}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
