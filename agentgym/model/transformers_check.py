"""Compares the decoder's forward pass with that of `transformers`, on the same weights.

Shapes: `T` position, `V` vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.model.decoder_config import folder_config
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_class import FOLDER_ALONE, load_fault
from agentgym.model.model_folder import published_views
from agentgym.model.packed_layout import PackedLayout

__all__ = ["check_forward"]

NUM_TOKENS = 24
MAX_DIFFERENCE = {torch.float32: 0.01, torch.float64: 0.01}
"""The largest difference in nats that rounding explains, by dtype; others have a bound on the mean,
`MEAN_DIFFERENCE`."""
MEAN_DIFFERENCE = 0.1


def check_forward(model: LanguageModel, folder: str | os.PathLike[str]) -> float | None:
    """Computes logprobs of a few tokens here and with `transformers`; returns the largest difference in nats.

    Both use the same tensors, so only activations take memory. Of a model without memory, two layers with random
    weights and a small vocabulary are compared. Returns None, without a comparison, for a model that transformers
    computes, and for a folder that agentgym wrote, whose config.json has nothing to misread. Raises ConfigError if the
    two models differ by more than rounding.
    """
    if not isinstance(model, Decoder):
        return None
    config = folder_config(folder)
    if config == model.config.to_hf() | {"torch_dtype": config.get("torch_dtype")}:
        return None
    ours_TV, theirs_TV = _logprobs(_stand_in(model) if model.embed.is_meta else model, folder)
    difference_TV = (ours_TV - theirs_TV).abs()
    largest, mean = float(difference_TV.max()), float(difference_TV.mean())
    dtype = model.embed.dtype
    if not (largest <= MAX_DIFFERENCE[dtype] if dtype in MAX_DIFFERENCE else mean <= MEAN_DIFFERENCE):
        raise ConfigError(
            f"the model in {str(folder)!r} is computed differently here and in transformers: over {NUM_TOKENS} tokens"
            f" their logprobs differ by up to {largest:.3g} nats (mean {mean:.3g}). Training and evaluation would be of"
            " another model. Please report its config.json; a server plays it as it is"
            " (`agentgym eval --policy http://HOST:PORT/v1`)"
        )
    return largest


def _stand_in(model: Decoder) -> Decoder:
    """Returns a decoder that computes as the model does, with random weights, and only as large as it has to be."""
    config, dtype = model.config, model.embed.dtype
    layers, vocabulary = min(2, config.num_layers), min(1024, config.vocab_size)
    decoder = Decoder(replace(config, num_layers=layers, vocab_size=vocabulary)).to(dtype)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, parameter.shape[-1] ** -0.5)
    return decoder.requires_grad_(False)


@torch.no_grad()
def _logprobs(model: Decoder, folder: str | os.PathLike[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both models' logprobs of every id after each of a few tokens, `[T, V]` float32."""
    from transformers import AutoConfig, AutoModelForCausalLM  # imported here because it takes a second

    device = model.embed.device
    try:
        config = AutoConfig.from_pretrained(folder, **FOLDER_ALONE)
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise load_fault(None, f"cannot read the configuration in {str(folder)!r}", error) from error
    with torch.device("meta"):
        config.vocab_size, config.num_hidden_layers = model.vocab_size, model.num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: model.num_layers]
        theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = dict(published_views(model))
    if model.head is None:
        tensors["lm_head.weight"] = model.embed
    theirs.load_state_dict(tensors, strict=True, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config=config).to(device)  # its buffers are in no file
    count = min(NUM_TOKENS, model.config.context_window)
    ids_T = torch.arange(count, device=device) * 7919 % model.config.vocab_size
    ours_TV = model.logits(model.hidden_states(ids_T, PackedLayout([count])))
    theirs_TV = theirs.eval()(input_ids=ids_T[None]).logits[0]
    return ours_TV.float().log_softmax(-1), theirs_TV.float().log_softmax(-1)
