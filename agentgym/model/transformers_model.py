"""Any causal language model of transformers over packed sequences, with shared prefixes, in place of the fast decoder.

The model's own modules compute; only attention is ours (`pass_attention`). Recurrent and hybrid models keep a state
that would pass from one sequence to the next, so their sequences are rows of a batch, each padded at its end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentgym.errors import AgentGymError, ConfigError, RunFolderError
from agentgym.model.architectures import dequantization
from agentgym.model.context_window import declared_window
from agentgym.model.language_model import KvShape, LanguageModel, LayerCost
from agentgym.model.linear import FastProducts, padded_size
from agentgym.model.lora_layer import AdaptedWeight, add_adapters, find_adapters, remove_adapters
from agentgym.model.model_class import class_of_model, first_line, load_fault, quiet_transformers
from agentgym.model.packed_layout import MIN_SHARED, PackedLayout, similar_rows
from agentgym.model.pass_attention import (
    HOOK,
    BatchAttention,
    KvProbe,
    OwnValues,
    PackedAttention,
    PassAttention,
    attention_of,
    register_hook,
)
from agentgym.model.published_weights import named_tensors, publish_blocks
from agentgym.model.routing import PassRouting, current_routing, find_routers, route_pass, routing_of
from agentgym.model.state_cache import PassCache, StateName, keeps_state
from agentgym.types import JSON

__all__ = ["TransformersModel", "load_transformers_model"]

# Shape suffixes: N packed tokens, M wanted entries, U computed tokens, E model width, V vocabulary.

SCALES: Mapping[str, int] = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
"""The keys of a config.json that scale the logits, with the exponent of the scale."""
PROBE_TOKENS = 3 * MIN_SHARED
"""Tokens of each sequence in the check of packed passes."""
MAX_DIFFERENCE = 1e-3
"""The largest difference in nats that rounding explains between a packed pass and a pass of its own in float32."""


class TransformersModel(LanguageModel):
    """A model of transformers behind the interface of our models; it stays in evaluation mode, without dropout."""

    def __init__(self, hf: Any, settings: Mapping[str, JSON]) -> None:
        super().__init__()
        self.hf = hf.eval()
        self.settings = dict(settings)
        """The config.json of the model's folder."""
        text = hf.config.get_text_config()
        self.vocab_size, self.width = self.embed.shape
        window = getattr(text, "max_position_embeddings", None)
        self.context_window = declared_window({"max_position_embeddings": window})
        self.num_layers = int(text.num_hidden_layers)
        self.softcap = getattr(text, "final_logit_softcapping", None)
        self.scale = 1.0
        for name, exponent in SCALES.items():
            self.scale *= float(getattr(text, name, None) or 1.0) ** exponent
        matrices = (matrix for matrix in self._backbone.parameters() if matrix is not self.embed)
        self.layer_cost = LayerCost.estimate(matrices, text, self.width)
        self._keeps_state = keeps_state(hf, text)
        self.packs = not self._keeps_state
        self.routers = find_routers(self._backbone)
        if getattr(text, "output_router_logits", False):
            self.balance_coefficient = float(getattr(text, "router_aux_loss_coef", None) or 0.0)
        self._freeze()
        self._kv: dict[int, KvShape] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_hook()  # another process may have made the model
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    @property
    def _backbone(self) -> Any:
        """The model without its head."""
        backbone = self.hf.get_decoder()
        return backbone.model if hasattr(backbone, "lm_head") else backbone  # Llama 4 names a model with its head

    def _freeze(self) -> None:
        """Freezes the parameters beside the language model, such as those of a vision tower, and frozen routers."""
        language = {id(parameter) for parameter in (*self._backbone.parameters(), self.embed, self.head_weight)}
        for parameter in self.hf.parameters():
            if id(parameter) not in language:
                parameter.requires_grad_(False)
        if self.routers_are_frozen:
            self.freeze_routers()

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks that transformers can checkpoint, those of a vision tower included."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return tuple(block for block in self.hf.modules() if isinstance(block, GradientCheckpointingLayer))[::-1]

    def requires_grad_(self, requires_grad: bool = True) -> TransformersModel:
        """Chooses whether the parameters of the language model are trained; those of frozen routers are not."""
        super().requires_grad_(requires_grad)
        self._freeze()
        return self

    @property
    def embed(self) -> Tensor:  # type: ignore[override]
        """The `[V, E]` embedding."""
        return cast(Tensor, self.hf.get_input_embeddings().weight)

    @property
    def head_weight(self) -> Tensor:
        """The `[V, E]` output matrix (the embedding itself if tied)."""
        return cast(Tensor, self.hf.get_output_embeddings().weight)

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """The sizes of each attention layer's keys and values, read off a pass over one token.

        A model without attention has a layer of one number, so that caches need no case of their own.
        """
        return tuple(self._kv_by_layer().values()) or (KvShape(1, 1),)

    @property
    def kv_index(self) -> dict[int, int]:
        """The position in `kv_shapes` of each attention layer, by the layer's index."""
        return {layer: index for index, layer in enumerate(self._kv_by_layer())}

    def num_chosen(self) -> int:
        """See `LanguageModel.num_chosen`."""
        self._kv_by_layer()
        return self._num_chosen

    @torch.no_grad()
    def probe_states(self) -> dict[StateName, Tensor]:
        """Returns the states `[1, ...]` that a sequence has beside keys and values; empty for none.

        Raises ConfigError for a model whose states cannot be kept from pass to pass, which two passes and one show.
        """
        if self.packs:
            return {}
        length = min(8, self.context_window)
        try:
            whole, parts = self._final_states([length]), self._final_states([length // 2, length - length // 2])
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(f"{type(self.hf).__name__} has a cache of its own kind: sample on a server") from error
        for name, state_1 in whole.items():
            if not (state_1 - parts[name]).abs().max() <= MAX_DIFFERENCE * state_1.abs().max():
                raise ConfigError(f"a pass of {type(self.hf).__name__} does not continue a state: sample on a server")
        return whole

    def _final_states(self, sizes: Sequence[int]) -> dict[StateName, Tensor]:
        """Returns the states after a short sequence, read in parts of these sizes."""
        ids_T = _probe_ids(self, sum(sizes), 0)
        position_T = torch.arange(len(ids_T), device=ids_T.device)
        states: dict[StateName, Tensor] = {}
        for ids, position in zip(ids_T[None].split(sizes, 1), position_T[None].split(sizes, 1), strict=True):
            cache = PassCache(self.hf, states)
            self.states(ids, position, OwnValues(), cache)
            states = cache.states()
        return states

    def _kv_by_layer(self) -> dict[int, KvShape]:
        if self._kv is None:
            layout = PackedLayout([1], self.embed.device)
            probe, routing = KvProbe(layout), PassRouting()
            with torch.no_grad(), routing_of(routing):
                self.states(torch.zeros_like(layout.source_U)[None], layout.every.position_U[None], probe)
            self._kv = dict(sorted(probe.found.items()))
            self._num_chosen = max((chosen_PK.shape[1] for chosen_PK in routing.chosen.values()), default=0)
        return self._kv

    def states(
        self, ids_BT: Tensor, position_BT: Tensor, attention: PassAttention, cache: PassCache | None = None
    ) -> Tensor:
        """Returns the final normalized, scaled states `[B * T, E]` of tokens at their positions, in one pass.

        With a `cache`, recurrent layers go on from its states and leave theirs in it.
        """
        with attention_of(attention):
            found = self._backbone(
                input_ids=ids_BT,
                position_ids=position_BT,
                attention_mask=torch.ones_like(ids_BT),  # without it, positions would be read as packed rows
                past_key_values=None if cache is None else cache.cache,
                use_cache=False,
            )
        states_UE = cast(Tensor, found.last_hidden_state.flatten(0, 1))
        return states_UE if self.scale == 1.0 else states_UE * self.scale

    def hidden_states(self, ids_N: Tensor, layout: PackedLayout) -> Tensor:
        """Returns the final states `[M, E]` of the wanted entries; see `LanguageModel`."""
        with FastProducts():
            return self._packed_states(ids_N, layout) if self.packs else self._states_by_row(ids_N, layout)

    def _packed_states(self, ids_N: Tensor, layout: PackedLayout) -> Tensor:
        every, entry_N = layout.every, torch.arange(len(ids_N), device=ids_N.device)
        with route_pass(layout.routing, entry_N, layout.place_N, len(layout.source_U)):
            states_UE = self.states(ids_N[layout.source_U][None], every.position_U[None], PackedAttention(layout))
        return states_UE[layout.wanted.index_U[layout.entry_M]]

    def _states_by_row(self, ids_N: Tensor, layout: PackedLayout) -> Tensor:
        """Computes rows of similar lengths as a batch; padding follows each row, whose state it cannot reach."""
        starts = [0, *accumulate(layout.seqlens)]
        parts, entries = [self.embed.new_zeros(0, self.width)], [ids_N.new_zeros(0)]
        alone = [[row] for row, length in enumerate(layout.seqlens) if length]
        groups = similar_rows(layout.seqlens) if self._keeps_state else alone
        num_passes = layout.exchange.most(len(groups))
        for group in groups:
            length = padded_size(max(layout.seqlens[row] for row in group))
            place_N = torch.cat(
                [number * length + torch.arange(layout.seqlens[row]) for number, row in enumerate(group)]
            )
            entry_N = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in group]).to(ids_N.device)
            ids_U = ids_N.new_zeros(len(group) * length)
            ids_U[place_N] = ids_N[entry_N]
            with route_pass(layout.routing, entry_N, place_N, len(ids_U)):
                parts.append(self._states_of_batch(ids_U.view(len(group), length))[place_N])
            entries.append(entry_N)
        for _ in range(len(groups), num_passes):  # none of these states is read
            parts.append(self._states_of_batch(ids_N.new_zeros(1, padded_size(1)))[:0])
        states_NE = torch.cat(parts)[torch.cat(entries).argsort()]
        return states_NE if layout.wanted_N is None else states_NE[layout.wanted_N]

    def _states_of_batch(self, ids_BT: Tensor) -> Tensor:
        position_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand(ids_BT.shape)
        return self.states(ids_BT, position_BT, BatchAttention(len(ids_BT)))

    def set_recompute(self, recomputes: bool) -> None:
        """See `LanguageModel.set_recompute`."""
        for block in self.blocks:
            vars(block).pop("forward", None)
            if recomputes:
                vars(block)["forward"] = partial(_recompute, type(block).forward, block)

    def to_hf(self) -> dict[str, JSON]:
        """Returns the `config.json` that the model was loaded with."""
        return dict(self.settings)

    def published_tensors(
        self, whole: Callable[[Tensor], Tensor] = lambda parameter: parameter
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor under its name in published checkpoints, block by block, as views of `whole(tensor)`.

        Transformers may store the experts of a layer as one tensor, which published checkpoints do not.
        """
        tensors = ((name, whole(tensor).detach()) for name, tensor in named_tensors(self.hf))
        return publish_blocks(self.hf, self.blocks, tensors)

    def adapt(self, targets: Sequence[str] | None, *, rank: int, scale: float) -> None:
        """Adds adapters that add nothing yet to the layers with these names; None is all but head and routers.

        Raises ConfigError for a name that no layer has.
        """
        inside, head = set(self._backbone.modules()), self.hf.get_output_embeddings()
        add_adapters(self.hf, inside - {head}, targets, rank=rank, scale=scale)

    def adapted_weights(self) -> Iterator[AdaptedWeight]:
        """Yields each weight with adapters."""
        return find_adapters(self.hf)

    def remove_adapters(self) -> None:
        """Removes the adapters, without merging them."""
        remove_adapters(self.hf)


def _recompute(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Computes a block, without inner states if there is a backward pass, which then computes them again.

    The checkpointing of transformers would drop the cache of a pass without gradients.
    """
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    routing = current_routing()  # that of the backward pass is another one

    def compute(*args: Any, **kwargs: Any) -> Any:
        with routing_of(routing), FastProducts():
            return forward(block, *args, **kwargs)

    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def load_transformers_model(
    folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, own: str | None = None
) -> TransformersModel:
    """Loads the model of a folder with transformers, or with a user's class of its kind, `path/to/file.py:Class`.

    Raises RunFolderError for missing, torn or further tensors, and ConfigError for a model that cannot be trained.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise RunFolderError(f"no model in {str(path)!r}: it needs a config.json and safetensors; give a model folder")
    settings = json.loads((path / "config.json").read_text())
    hf = _load(path, dtype, dequantization(settings), own)
    if own is not None:
        settings["architectures"] = [type(hf).__name__]  # without the class, the folder is not read as another model
    model = TransformersModel(hf, {name: value for name, value in settings.items() if name != "quantization_config"})
    try:
        _check_head(model)
        check_packing(model)
    except ConfigError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise load_fault(own, f"cannot compute the model in {str(path)!r}", error) from error
    return model


def _load(path: Path, dtype: torch.dtype, options: Mapping[str, object], own: str | None) -> Any:
    register_hook()
    try:
        with quiet_transformers():  # what it would report of tensors is an error below
            hf, found = class_of_model(path, own)[1].from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=HOOK,
                experts_implementation=None if torch.cuda.is_available() else "eager",  # others mix a product's rows
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
    except AgentGymError:
        raise
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"no model can be read from {str(path)!r}: {first_line(error)}") from error
    except Exception as error:  # the boundary: each architecture refuses settings in its own way
        raise load_fault(own, f"cannot load the model in {str(path)!r}", error) from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, found.get(kind) or ())):
            what = kind.partition("_")[0]
            todo = f"; {own} has to be saved there with save_pretrained first" if own else ""
            raise RunFolderError(f"{str(path)!r} has {len(names)} {what} tensors, the first is {names[0]}{todo}")
    if options:
        del hf._weight_conversions  # those of the quantized form, in which nothing is published
    return hf


@torch.no_grad()
def _check_head(model: TransformersModel) -> None:
    """Raises ConfigError unless our logits are those of the model's own head."""
    head = model.hf.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError("a model without a linear output head, or with a bias in it, is not supported")
    length = min(8, model.context_window)
    layout = PackedLayout([length], model.embed.device)
    ids_T = _probe_ids(model, length, 0)
    ours_TV = model.logits(model.hidden_states(ids_T, layout)).float().log_softmax(-1)
    with attention_of(PackedAttention(layout)):
        ids_U, position_U = ids_T[layout.source_U], layout.every.position_U
        mask = torch.ones_like(ids_U)[None]
        found = model.hf(
            input_ids=ids_U[None], position_ids=position_U[None], attention_mask=mask, use_cache=False
        ).logits[0, :length]
    difference = float((ours_TV - found.float().log_softmax(-1)).abs().max())
    if not difference <= (0.01 if model.embed.dtype == torch.float32 else 0.5):
        raise ConfigError(
            f"the logits of {type(model.hf).__name__} are not those of its final states and head: they differ by"
            f" {difference:.3g} nats, so it cannot be trained here"
        )


@torch.no_grad()
def check_packing(model: TransformersModel) -> None:
    """Chooses rows of their own if sequences that share a pass change each other's logprobs."""
    if not model.packs or model.embed.dtype != torch.float32:
        return
    length = min(PROBE_TOKENS, model.context_window)
    shared_T = _probe_ids(model, length, 0)
    rows = [torch.cat([shared_T[: 2 * length // 3], _probe_ids(model, length, seed)])[:length] for seed in (1, 2)]
    ids_N, device = torch.cat(rows), model.embed.device
    packed_NV = model.logits(model.hidden_states(ids_N, PackedLayout([length] * 2, device, ids_N=ids_N)))
    own_NV = torch.cat([model.logits(model.hidden_states(ids, PackedLayout([length], device))) for ids in rows])
    difference = float((packed_NV.float().log_softmax(-1) - own_NV.float().log_softmax(-1)).abs().max())
    if not difference <= MAX_DIFFERENCE:
        model.packs = False


def _probe_ids(model: TransformersModel, length: int, seed: int) -> Tensor:
    return (torch.arange(length, device=model.embed.device) * 7919 + 104_729 * seed) % model.vocab_size
