"""Writes the model of a GGUF file as a folder of safetensors in float32, as transformers dequantizes them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  # without it transformers loads no GGUF
import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from agentgym.errors import RunFolderError
from agentgym.model.gguf.gguf_file import GgufHeader, read_header
from agentgym.model.model_class import FOLDER_ALONE, first_line, quiet_transformers

__all__ = ["write_gguf_folder"]

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
LINK = "model.gguf"
MAX_RATIO = 2
"""The weights of a model to those in its file, at most: all else is damaged, and would take any memory."""
READS_SCALING = "gpt-oss"
"""The architecture whose scaling of rotary embeddings transformers reads from GGUF."""


def write_gguf_folder(file: Path, beside: Sequence[Path], part: Path) -> None:
    """Writes the model and tokenizer of a file into the new folder `part`, with the files `beside` it in their place.

    Raises RunFolderError for a file that is damaged, lacks a tokenizer, or is of a kind that transformers does not
    read: before the weights are read, if the header shows it.
    """
    header = _check(file, {other.name for other in beside})
    part.mkdir()
    for other in beside:
        shutil.copyfile(other, part / other.name)
    (part / LINK).symlink_to(file.absolute())  # transformers looks at all that is in the file's folder
    with quiet_transformers():
        try:
            tokenizer, model, missing = _load(part, header)
        except Exception as error:  # the boundary: each architecture and tokenizer fails in its own way
            kind, words = map(header.settings.get, ("general.architecture", "tokenizer.ggml.model"))
            what = f"{str(file)!r} (architecture {kind}, tokenizer {words})"
            raise RunFolderError(f"transformers does not load {what}: {first_line(error)}") from error
        if missing:
            raise RunFolderError(
                f"{str(file)!r} lacks {len(missing)} tensors in the shapes of its model, the first is {missing[0]}"
            )
        (part / LINK).unlink()
        model.save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
    for other in beside:
        if other.name != CONFIG:
            shutil.copyfile(other, part / other.name)


def _load(part: Path, header: GgufHeader) -> tuple[Any, Any, list[str]]:
    """Returns the linked file's tokenizer, or None if `part` has one, its model, and the tensors that this lacks."""
    of_file = {"gguf_file": LINK, **FOLDER_ALONE}
    config = AutoConfig.from_pretrained(part, **(FOLDER_ALONE if (part / CONFIG).is_file() else of_file))
    config = config.get_text_config()
    with torch.device("meta"):  # besides, the model of the file is marked as quantized, and is not saved
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_weights = sum(parameter.numel() for parameter in plain.parameters())
    if num_weights > MAX_RATIO * header.num_weights:
        raise ValueError(f"its settings are those of {num_weights:,} weights, and it has {header.num_weights:,}")
    tokenizer = None if (part / TOKENIZER).is_file() else AutoTokenizer.from_pretrained(part, **of_file)
    model, report = AutoModelForCausalLM.from_pretrained(
        part, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **of_file
    )
    missing = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return tokenizer, plain, sorted(missing)


def _check(file: Path, beside: set[str]) -> GgufHeader:
    """Returns the header of a file; raises RunFolderError for what transformers does not read, or reads wrongly."""
    header = read_header(file, {kind.value: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()})
    where, settings, names = repr(str(file)), header.settings, list(header.types)
    if settings.get("split.count", 1) not in (0, 1):
        raise RunFolderError(f"{where} is a part of a model: `llama-gguf-split --merge` makes one file of its parts")
    if TOKENIZER not in beside and not {"tokenizer.ggml.model", "tokenizer.ggml.tokens"} <= settings.keys():
        raise RunFolderError(f"{where} contains no tokenizer: put the model's {TOKENIZER} beside the file")
    for kind, name in {kind: name for name, kind in header.types.items()}.items():
        if not _is_read(kind):
            raise RunFolderError(
                f"{where} has tensors of a type that the package gguf does not dequantize: {name} has the type {kind}"
            )
    architecture = settings.get("general.architecture")
    num_layers = len({name.split(".")[1] for name in names if name.startswith("blk.")})
    if settings.get(f"{architecture}.block_count", 0) not in range(num_layers + 1):
        raise RunFolderError(
            f"{where} is not a whole model in GGUF: it has {num_layers} layers, and names another number"
        )
    scaling = [name for name in names if name.startswith("rope_")]
    scaling += [name for name, value in settings.items() if name.endswith("rope.scaling.type") and value != "none"]
    if scaling and CONFIG not in beside and architecture != READS_SCALING:
        raise RunFolderError(
            f"{where} scales its rotary embeddings ({scaling[0]}), which transformers does not read: put the model's"
            f" {CONFIG} beside the file"
        )
    return header


def _is_read(kind: int) -> bool:
    """Returns True if the package gguf dequantizes tensors of a type."""
    try:
        block_type = gguf.GGMLQuantizationType(kind)
        _, block_bytes = gguf.GGML_QUANT_SIZES[block_type]
        gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), block_type)
    except (ValueError, NotImplementedError):
        return False
    return True
