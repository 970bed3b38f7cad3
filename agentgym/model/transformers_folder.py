"""Loads a model of transformers from a folder, and refuses one that is not computed as transformers does."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentgym.errors import AgentGymError, ConfigError, RunFolderError, UserCodeFault
from agentgym.model.architectures import dequantization
from agentgym.model.decoder_config import folder_config
from agentgym.model.language_model import ROUNDING, logits_difference
from agentgym.model.model_class import FOLDER_ALONE, class_of_model, first_line, load_fault, quiet_transformers
from agentgym.model.packed_layout import MIN_SHARED, PackedLayout
from agentgym.model.pass_attention import HOOK, BatchAttention, PositionMask, attention_of, register_hook
from agentgym.model.transformers_model import LENGTH, TransformersModel

__all__ = ["load_transformers_model"]

logger = logging.getLogger(__name__)

# Shape suffixes: N packed tokens, T tokens of a sequence, V vocabulary.

PACKED_LENGTH = 3 * MIN_SHARED
"""Tokens of each sequence in the check of packed passes."""
MAX_DIFFERENCE = 1e-3
"""The largest difference in nats that rounding explains between a packed pass and a pass of its own in float32."""


def load_transformers_model(
    folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, own: str | None = None
) -> TransformersModel:
    """Loads the model of a folder with transformers, or with a user's class of its kind, `path/to/file.py:Class`.

    Raises RunFolderError for missing, torn or further tensors, and ConfigError for a model that cannot be trained.
    """
    path = Path(folder)
    settings = folder_config(path)
    hf = _load(path, dtype, dequantization(settings), own)
    if own is not None:
        settings["architectures"] = [type(hf).__name__]  # without the class, the folder is not read as another model
    plain = {name: value for name, value in settings.items() if name != "quantization_config"}
    model = TransformersModel(hf, plain)
    names = _left_out_tensors(path, model)
    if names and model.settings == plain:  # else the model has named its drafts
        text = "%s does not compute all of %s: tensors that are neither trained nor saved: %d, the first is %s"
        logger.warning(text, type(hf).__name__, path, len(names), names[0])
    try:
        _check_logits(model)
        _check_packing(model)
    except ConfigError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise _load_fault(own, f"cannot compute the model in {str(path)!r}", error) from error
    return model


def _load_fault(own: str | None, what: str, error: Exception) -> ConfigError | UserCodeFault:
    """Returns the error to raise for one of transformers' code; its classes attend in two ways, ours in one."""
    attends_itself = isinstance(error, KeyError) and error.args == (HOOK,)
    if attends_itself or PositionMask.__name__ in str(error):
        return ConfigError(
            f"{what}: its attention does not go through transformers' AttentionInterface, or changes masks by itself,"
            " so neither packed rows nor the engine compute it; a server plays it (--policy http://HOST:PORT/v1)"
        )
    return load_fault(own, what, error)


def _load(path: Path, dtype: torch.dtype, options: Mapping[str, object], own: str | None) -> Any:
    register_hook()
    try:
        with quiet_transformers():  # what it would report of tensors is an error below
            hf, loading_info = class_of_model(path, own)[1].from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=HOOK,
                experts_implementation=None if torch.cuda.is_available() else "eager",  # others mix a product's rows
                output_loading_info=True,
                **FOLDER_ALONE,
                **options,
            )
    except AgentGymError:
        raise
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"no model can be read from {str(path)!r}: {first_line(error)}") from error
    except Exception as error:  # the boundary: each architecture refuses settings in its own way
        raise _load_fault(own, f"cannot load the model in {str(path)!r}", error) from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, loading_info.get(kind) or ())):
            what = kind.partition("_")[0]
            todo = f"; {own} has to be saved there with save_pretrained first" if own else ""
            raise RunFolderError(f"{str(path)!r} has {len(names)} {what} tensors, the first is {names[0]}{todo}")
    if options:
        del hf._weight_conversions  # those of the quantized form, in which nothing is published
    return hf


def _left_out_tensors(path: Path, model: TransformersModel) -> list[str]:
    """Returns the stored weights that the model's class passes over, such as those of drafts or of a vision tower."""
    pattern = "|".join(getattr(model.hf, "_keys_to_ignore_on_load_unexpected", None) or ())
    stored = [name for file in path.glob("*.safetensors") if pattern for name in _tensor_names(file)]
    names = sorted({name for name in stored if name.endswith("weight") and re.search(pattern, name)})
    return [name for name in names if name not in dict(model.published_tensors())] if names else []


def _tensor_names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


@torch.no_grad()
def _check_logits(model: TransformersModel) -> None:
    """Raises ConfigError unless our logits are those of transformers, which depend on no later token."""
    head = model.hf.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError("a model without a linear output head, or with a bias in it, is not supported")
    length = min(LENGTH, model.context_window)
    half, kind, ids_T = max(1, length // 2), type(model.hf).__name__, model.probe_ids(length, 0)
    ours_TV, theirs_TV = _logits(model, ids_T[:half]), _their_logits(model, ids_T[:half])
    difference = logits_difference(ours_TV, theirs_TV)
    looks_ahead = bool(logits_difference(_logits(model, ids_T)[:half], ours_TV, 3 * ROUNDING))
    if looks_ahead or (difference and logits_difference(_their_logits(model, ids_T)[:half], theirs_TV, 3 * ROUNDING)):
        raise ConfigError(
            f"{kind} attends to later tokens (bidirectional attention, as encoders and embedding models do), so it"
            " predicts no next token: give a causal language model"
        )
    if difference:
        raise ConfigError(
            f"the logits of {kind} are not those of its final states and head, as they are computed here: they differ"
            f" by {difference} nats, so it cannot be trained here"
        )


@torch.no_grad()
def _check_packing(model: TransformersModel) -> None:
    """Chooses rows of their own if sequences that share a pass change each other's logprobs."""
    if not model.packs or model.embed.dtype != torch.float32:
        return
    length = min(PACKED_LENGTH, model.context_window)
    shared_T = model.probe_ids(length, 0)
    rows = [torch.cat([shared_T[: 2 * length // 3], model.probe_ids(length, seed)])[:length] for seed in (1, 2)]
    ids_N, device = torch.cat(rows), model.embed.device
    packed_NV = model.logits(model.hidden_states(ids_N, PackedLayout([length] * 2, device, ids_N=ids_N)))
    own_NV = torch.cat([_logits(model, ids_T) for ids_T in rows])
    difference = float((packed_NV.float().log_softmax(-1) - own_NV.float().log_softmax(-1)).abs().max())
    if not difference <= MAX_DIFFERENCE:
        model.packs = False


def _logits(model: TransformersModel, ids_T: Tensor) -> Tensor:
    return model.logits(model.hidden_states(ids_T, PackedLayout([len(ids_T)], ids_T.device)))


def _their_logits(model: TransformersModel, ids_T: Tensor) -> Tensor:
    """Returns the logits `[T, V]` of the model's own head and attention."""
    position_1T = torch.arange(len(ids_T), device=ids_T.device)[None]
    mask_1T = torch.ones_like(position_1T)
    with quiet_transformers(), attention_of(BatchAttention(1)):
        model.hf.set_attn_implementation("eager")
        try:
            output = model.hf(input_ids=ids_T[None], position_ids=position_1T, attention_mask=mask_1T, use_cache=False)
        finally:
            model.hf.set_attn_implementation(HOOK)
    logits_TV: Tensor = output.logits[0]
    return logits_TV
