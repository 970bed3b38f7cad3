"""Reads and writes models as folders, under the parameter names that `transformers` publishes."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from agentgym.errors import ConfigError, EngineError, RunFolderError
from agentgym.model.decoder import Decoder, DecoderConfig, DecoderLayer
from agentgym.model.decoder_config import folder_config
from agentgym.model.language_model import LanguageModel
from agentgym.model.ops.cpu_products import warn_of_slow_bfloat16
from agentgym.model.published_weights import LoraWeights, Weights
from agentgym.model.transformers_model import TransformersModel
from agentgym.types import JSON

__all__ = [
    "decoder_config",
    "empty_decoder",
    "fill_decoder",
    "is_read",
    "load_decoder",
    "model_tensors",
    "on_device",
    "own_tensors",
    "published_views",
    "reading",
    "save_model_folder",
    "write_model",
    "write_model_config",
]

Model = TypeVar("Model", bound=LanguageModel)

LOCK_FILE = "config.json"
"""The file of a model folder that readers lock."""


def published_views(
    model: LanguageModel, whole: Callable[[Tensor], Tensor] = lambda parameter: parameter
) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter under its published name, as a view of the model's own memory.

    With `whole`, the views are of what it returns for each parameter. Of a model of transformers, tensors that are
    stored in another form than they are published may be copies.
    """
    if isinstance(model, TransformersModel):
        yield from model.published_tensors(whole)
        return
    assert isinstance(model, Decoder)
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


def own_tensors(model: LanguageModel, weights: Weights) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs of a model's tensor and the tensor that replaces it; empty if there are no weights.

    Raises EngineError if the weights are not exactly those of this model.
    """
    if isinstance(weights, LoraWeights):
        raise EngineError("the local engine takes no adapter alone: give it the merged weights")
    own_views, new_tensors = dict(published_views(model)), dict(weights)
    if not new_tensors:
        return []
    _refuse_copies(model, own_views)
    if odd := sorted(own_views.keys() ^ new_tensors.keys()):
        raise EngineError(f"weights of another model: {len(odd)} tensors are of one alone, the first is {odd[0]!r}")
    pairs = []
    for name, own in own_views.items():
        new = new_tensors[name]
        if not isinstance(new, Tensor) or new.shape != own.shape:
            raise EngineError(f"a tensor of shape {tuple(own.shape)} was wanted as {name!r}, got {new!r:.100}")
        pairs.append((own, new))
    return pairs


def _refuse_copies(model: LanguageModel, views: Mapping[str, Tensor]) -> None:
    """Raises EngineError if a published tensor does not share the memory of the model."""
    if not isinstance(model, TransformersModel):
        return
    own = {tensor.untyped_storage().data_ptr() for tensor in model.hf.state_dict().values()}
    for name, tensor in views.items():
        if tensor.untyped_storage().data_ptr() not in own:
            raise EngineError(
                f"{name!r} is stored in another form than it is published, so this model cannot take new weights from"
                " outside: train with executor local and max_staleness 0, or sample on a server"
            )


def load_decoder(folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Loads a folder of `config.json` and safetensors, sharded or not; raises RunFolderError naming what is missing."""
    empty_decoder(folder)  # refuses sizes that no stored tensor has before they take memory
    model = Decoder(decoder_config(folder)).to(dtype)
    fill_decoder(model, folder, lambda parameter, stored: parameter.copy_(stored))
    return model


def empty_decoder(folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Returns the decoder of a folder without memory for its weights; raises RunFolderError as `load_decoder` does."""
    with torch.device("meta"):
        model = Decoder(decoder_config(folder)).to(dtype)
    path = Path(folder)
    with reading(path), _StoredTensors(path) as stored:
        stored.check({name: view.shape for name, view in published_views(model)})
    return model


def decoder_config(folder: str | os.PathLike[str]) -> DecoderConfig:
    """Returns the shape of the model in a folder; raises RunFolderError if there is no model."""
    return DecoderConfig.from_hf(folder_config(folder))


@torch.no_grad()
def fill_decoder(model: Decoder, folder: str | os.PathLike[str], put: Callable[[nn.Parameter, Tensor], object]) -> None:
    """Calls `put` with each parameter and its whole value from the folder, one at a time.

    Only one value is in memory at a time. Raises RunFolderError as `load_decoder` does, before the first call.
    """
    path = Path(folder)
    with reading(path), _StoredTensors(path) as stored:
        stored.check({name: view.shape for name, view in published_views(model, _without_memory)})
        begun: list[tuple[nn.Parameter, Tensor]] = []

        def begin(parameter: Tensor) -> Tensor:
            """Returns memory for the next parameter, whose views follow; the previous parameter is complete."""
            assert isinstance(parameter, nn.Parameter)
            if begun:
                put(*begun.pop())
            begun.append((parameter, torch.empty(parameter.shape, dtype=parameter.dtype)))
            return begun[0][1]

        for name, view in published_views(model, begin):
            view.copy_(stored.read(name))
        put(*begun.pop())


def _without_memory(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, device="meta")


class _StoredTensors:
    """The tensors of a folder's safetensors files, read one at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._stack = path, ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> _StoredTensors:
        files = self._path.glob("*.safetensors")
        shards = sorted(file for file in files if not file.name.startswith("consolidated"))  # Mistral's second copy
        if not shards:
            raise RunFolderError(
                f"model folder {str(self._path)!r} holds no .safetensors file; save the model in that format"
            )
        for shard in shards:
            try:
                if not shard.is_file():  # a pipe would be waited for
                    raise OSError("not a file")
                file = self._stack.enter_context(safe_open(shard, "pt"))
            except (OSError, SafetensorError) as error:
                raise RunFolderError(f"{str(shard)!r} is torn or not a safetensors file: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raises RunFolderError unless exactly these tensors are there; a head equal to the embedding may be extra."""
        names = {name for name in self._files if name in shapes or name != "lm_head.weight"}
        if missing := sorted(shapes.keys() - names):
            raise RunFolderError(f"{str(self._path)!r} lacks {len(missing)} tensors, the first is {missing[0]!r}")
        if unknown := sorted(names - shapes.keys()):
            unknown_tensors = f"{len(unknown)} tensors of no known use, the first is {unknown[0]!r}"
            raise RunFolderError(f"{str(self._path)!r} holds {unknown_tensors}")
        for name, shape in shapes.items():
            stored = tuple(self._files[name].get_slice(name).get_shape())
            if stored != tuple(shape):
                raise RunFolderError(
                    f"tensor {name!r} of {str(self._path)!r} has shape {stored}, config.json says {tuple(shape)}"
                )

    @property
    def num_parameters(self) -> int:
        """The numbers of all tensors."""
        return sum(math.prod(file.get_slice(name).get_shape()) for name, file in self._files.items())

    def read(self, name: str) -> Tensor:
        """Returns the tensor with this name."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def on_device(model: Model, device: str) -> Model:
    """Moves the model to a device and returns it; raises ConfigError if the device is not available.

    Warns of bfloat16 on a processor that has no products in it. On a GPU, torch no longer takes cuDNN's attention by
    itself, which builds a plan for each shape: 1.6 s a batch.
    """
    try:
        if torch.device(device).type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)
        elif any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
            warn_of_slow_bfloat16()
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch's errors for a missing device
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {device!r} cannot be used ({reason}); a model runs on cpu everywhere") from error


def count_parameters(folder: Path) -> int:
    """Returns the numbers that a model folder's safetensors files hold, by their headers.

    Of a folder with files of another format, it is half of their bytes; 0 without any.
    """
    if not next(folder.glob("*.safetensors"), None):
        return sum(file.stat().st_size for file in folder.glob("*.bin")) // 2
    with _StoredTensors(folder) as stored:
        return stored.num_parameters


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keeps runs from deleting the model folder inside the context, in case it is one of their checkpoints."""
    with open(folder / LOCK_FILE, "rb") as file:
        with suppress(OSError):  # a file system without locks: a run cannot know, and keeps what it may not delete
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_read(folder: Path) -> bool:
    """True if this or another process is `reading` the folder, or if the file system cannot report it."""
    try:
        with open(folder / LOCK_FILE, "rb+") as file:  # for writing: a network file system locks nothing else
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def model_tensors(model: LanguageModel, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies every parameter to the CPU under its published name.

    Later changes of the model do not affect the copies.
    """
    return {
        name: view.detach().to("cpu", dtype or view.dtype, copy=True, memory_format=torch.contiguous_format)
        for name, view in published_views(model)
    }


def write_model(config: Mapping[str, JSON], tensors: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Writes `config.json`, of which `config` is the contents, with the dtype of the tensors, and `model.safetensors`.

    `transformers`' `from_pretrained` reads the folder.
    """
    write_model_config(config, next(iter(tensors.values())).dtype, folder)
    save_file(dict(tensors), Path(folder) / "model.safetensors", metadata={"format": "pt"})


def write_model_config(config: Mapping[str, JSON], dtype: torch.dtype, folder: str | os.PathLike[str]) -> None:
    """Writes `config.json` with the dtype of the weights, and makes the folder if there is none."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    settings = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    settings.pop("dtype", None)  # a newer name of the same key
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def save_model_folder(
    model: LanguageModel, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Writes the model as `write_model` does, in its own dtype or another one."""
    write_model(model.to_hf(), model_tensors(model, dtype=dtype), folder)
