"""Any causal language model of transformers over packed sequences, with shared prefixes, in place of the fast decoder.

The model's own modules compute; only attention is ours (`pass_attention`). Recurrent and hybrid models keep a state
that would pass from one sequence to the next, so their sequences are rows of a batch, each padded at its end.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentgym.errors import describe_error
from agentgym.model.decoder_config import declared_window
from agentgym.model.language_model import KvShape, LanguageModel, LayerCost, logits_difference
from agentgym.model.linear import FastProducts, padded_size
from agentgym.model.lora_layer import AdaptedWeight, add_adapters, find_adapters, remove_adapters
from agentgym.model.packed_layout import PackedLayout, similar_rows
from agentgym.model.pass_attention import (
    BatchAttention,
    KeptKeys,
    KvProbe,
    PackedAttention,
    PassAttention,
    attention_of,
    register_hook,
)
from agentgym.model.published_weights import named_tensors, publish_blocks
from agentgym.model.rope import short_rope_length
from agentgym.model.routing import PassRouting, current_routing, find_routers, route_pass, routing_of
from agentgym.model.state_cache import PassCache, StateName, keeps_state
from agentgym.types import JSON

__all__ = ["TransformersModel"]

# Shape suffixes: N packed tokens, M wanted entries, U computed tokens, E model width, V vocabulary.

SCALES: Mapping[str, int] = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
"""The keys of a config.json that scale the logits, with the exponent of the scale."""
DRAFTS = "mtp|nextn"
"""The names of what predicts several tokens, in keys and parameters."""
LENGTH = 8
"""Tokens of the sequence that checks compute."""
IN_PARTS, BY_TOKENS = (4, 2, 1, 1), (4, 1, 1, 1, 1)
"""The parts in which a sequence is read: a prompt in two parts, then single tokens, or single tokens after one part."""
MAX_STATE_DIFFERENCE = 0.01
"""The largest difference of a state that rounding explains in float32, relative to its largest number."""
logger = logging.getLogger(__name__)


class TransformersModel(LanguageModel):
    """A model of transformers behind the interface of our models; it stays in evaluation mode, without dropout."""

    def __init__(self, hf: Any, settings: Mapping[str, JSON]) -> None:
        super().__init__()
        self.hf = hf.eval()
        computes_drafts = any(re.search(DRAFTS, name) for name, _ in hf.named_parameters())
        self.settings = dict(settings) if computes_drafts else _without_drafts(settings)
        """The config.json of the model's folder, without layers that the model does not have."""
        if self.settings != settings:
            logger.warning(
                "%s computes no layers of multi-token prediction (MTP): their tensors are neither trained nor saved,"
                " and the config.json of what is saved names none",
                type(hf).__name__,
            )
        text = hf.config.get_text_config()
        self.vocab_size, self.width = self.embed.shape
        window = getattr(text, "max_position_embeddings", None)
        rope = {"rope_parameters": getattr(text, "rope_parameters", None)}
        self.context_window = declared_window({"max_position_embeddings": window, **rope})
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
            text.output_router_logits = False  # else each pass keeps them, by hooks that reach no other process
        self._short_rope = short_rope_length(rope)
        self._cache_name = _cache_name(self._backbone)
        self._freeze()

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
        """The sizes of the keys and values of each call of attention in a pass, in order: a layer may have several.

        A model without attention has a call of one number, so that caches need no case of their own.
        """
        return tuple(shape for _, shape in self._first_pass[0]) or (KvShape(1, 1),)

    @property
    def attending_layers(self) -> frozenset[int]:
        """The layers that attend through transformers' AttentionInterface."""
        return frozenset(layer for layer, _ in self._first_pass[0])

    def num_chosen(self) -> int:
        return self._first_pass[1]

    def probe_states(self) -> Mapping[StateName, Tensor]:
        """Returns the states `[1, ...]` that an engine keeps for a sequence beside keys and values; empty for none."""
        return self._decoding[0] or {}

    @property
    def continues(self) -> bool:
        """True if a pass can go on from the keys, values and states of earlier ones, and needs no whole sequence."""
        return self._decoding[0] is not None

    @property
    def continues_by_tokens(self) -> bool:
        """True if a pass that goes on from earlier ones has to be over a single token."""
        return self._decoding[1]

    @cached_property
    def _decoding(self) -> tuple[Mapping[StateName, Tensor] | None, bool]:
        """The states `[1, ...]` of a sequence, or None if passes do not go on from parts; whether they take tokens."""
        if self.embed.is_meta:
            return {}, False
        reasons = []
        for by_tokens, sizes in ((False, IN_PARTS), (True, BY_TOKENS)):
            states = self._probe_parts(sizes)
            if not isinstance(states, str):
                return states, by_tokens
            reasons.append(states)
        logger.warning(
            "%s cannot go on from what the engine in process keeps of a sequence (%s): each token is computed with the"
            " whole sequence, which is right and slow; a server is faster",
            type(self.hf).__name__,
            reasons[-1],
        )
        return None, False

    @torch.no_grad()
    def _probe_parts(self, sizes: Sequence[int]) -> Mapping[StateName, Tensor] | str:
        """Returns the states of a sequence that is read in these parts, or why logits or states are not those of one.

        Each part has the keys, values and states that the parts before it left.
        """
        ids_T = self.probe_ids(min(LENGTH, self.context_window), 0)
        try:
            (own_TV, states), (whole_TV, whole) = self._read(ids_T, sizes), self._read(ids_T, [LENGTH])
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:  # a cache of its own kind
            return describe_error(error)
        packed_TV = self.logits(self.hidden_states(ids_T, PackedLayout([len(ids_T)], ids_T.device)))
        bound = MAX_STATE_DIFFERENCE if self.embed.dtype == torch.float32 else 10 * MAX_STATE_DIFFERENCE
        same = [(states[name] - own).abs().max() <= bound * own.abs().max() for name, own in whole.items()]
        differs = logits_difference(own_TV, packed_TV) or logits_difference(own_TV, whole_TV)
        if differs:
            return f"logprobs differ by {differs} nats"
        return states if all(same) else "states differ"

    def _read(self, ids_T: Tensor, sizes: Sequence[int]) -> tuple[Tensor, dict[StateName, Tensor]]:
        """Returns the logits `[T, V]` of a sequence that is read in parts of these sizes at most, and its states."""
        kept_keys, logits, states = KeptKeys(), [], dict[StateName, Tensor]()
        position_T = torch.arange(len(ids_T), device=ids_T.device)
        for first, size in zip([0, *accumulate(sizes)], sizes, strict=False):
            own = slice(first, first + size)
            if len(ids_T[own]):
                cache = PassCache(self.hf, states) if self._keeps_state else None
                kept_keys.begin_pass()
                logits.append(self.logits(self.states(ids_T[own][None], position_T[own][None], kept_keys, cache)))
                states = {} if cache is None else cache.states()
        return torch.cat(logits), states

    def probe_ids(self, length: int, seed: int) -> Tensor:
        """Returns the ids `[T]` of a sequence that a check computes."""
        return (torch.arange(length, device=self.embed.device) * 7919 + 104_729 * seed) % self.vocab_size

    @cached_property
    def _first_pass(self) -> tuple[Sequence[tuple[int, KvShape]], int]:
        """The layer and the sizes of each call of attention, and the experts of a token, of a pass over one token."""
        layout = PackedLayout([1], self.embed.device)
        probe, routing = KvProbe(layout), PassRouting()
        with torch.no_grad(), routing_of(routing):
            self.states(torch.zeros_like(layout.source_U)[None], layout.every.position_U[None], probe)
        return probe.calls, max((chosen_PK.shape[1] for chosen_PK in routing.chosen.values()), default=0)

    def states(
        self, ids_BT: Tensor, position_BT: Tensor, attention: PassAttention, cache: PassCache | None = None
    ) -> Tensor:
        """Returns the final normalized, scaled states `[B * T, E]` of tokens at their positions, in one pass.

        With a `cache`, recurrent layers go on from its states and leave theirs in it.
        """
        cache_arguments = {} if cache is None else {self._cache_name: cache.cache}
        with attention_of(attention):
            output = self._backbone(
                input_ids=ids_BT,
                position_ids=position_BT,
                attention_mask=torch.ones_like(ids_BT),  # without it, positions would be read as packed rows
                use_cache=False,
                **cache_arguments,
            )
        states_UE = cast(Tensor, output.last_hidden_state.flatten(0, 1))
        return states_UE if self.scale == 1.0 else states_UE * self.scale

    def hidden_states(self, ids_N: Tensor, layout: PackedLayout) -> Tensor:
        """Returns the final states `[M, E]` of the wanted entries; see `LanguageModel`."""
        with FastProducts():
            packs = self.packs and not self._has_two_ropes(layout)
            return self._packed_states(ids_N, layout) if packs else self._states_by_row(ids_N, layout)

    def _has_two_ropes(self, layout: PackedLayout) -> bool:
        """True if a pass has rows with the rotary embeddings of short ones and rows with others, on any rank."""
        if self._short_rope is None:
            return False
        kinds = {length > self._short_rope for length in layout.seqlens if length}
        return bool(layout.exchange.max_over_ranks(int(len(kinds) > 1)))

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
        num_passes = layout.exchange.max_over_ranks(len(groups))
        for group in groups:
            longest = max(layout.seqlens[row] for row in group)
            length = padded_size(longest)
            place_N = torch.cat(
                [number * length + torch.arange(layout.seqlens[row]) for number, row in enumerate(group)]
            )
            entry_N = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in group]).to(ids_N.device)
            ids_U = ids_N.new_zeros(len(group) * length)
            ids_U[place_N] = ids_N[entry_N]
            with route_pass(layout.routing, entry_N, place_N, len(ids_U)):
                parts.append(self._states_of_batch(ids_U.view(len(group), length), longest)[place_N])
            entries.append(entry_N)
        for _ in range(len(groups), num_passes):  # none of these states is read
            parts.append(self._states_of_batch(ids_N.new_zeros(1, padded_size(1)), 1)[:0])
        states_NE = torch.cat(parts)[torch.cat(entries).argsort()]
        return states_NE if layout.mask_N is None else states_NE[layout.mask_N]

    def _states_of_batch(self, ids_BT: Tensor, longest: int) -> Tensor:
        """Returns the states of rows of up to `longest` tokens; padding has no later position than they have."""
        position_T = torch.arange(ids_BT.shape[1], device=ids_BT.device).clamp(max=longest - 1)
        position_BT = position_T.expand(ids_BT.shape)
        return self.states(ids_BT, position_BT, BatchAttention(len(ids_BT)))

    def set_recompute(self, recomputes: bool) -> None:
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


def _without_drafts(config: Mapping[str, JSON]) -> dict[str, JSON]:
    """Returns a config.json without layers of multi-token prediction, which transformers neither computes nor saves."""
    plain: dict[str, JSON]
    plain = {key: _without_drafts(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    drafts = {key: value for key, value in plain.items() if isinstance(value, int) and re.search(DRAFTS, key)}
    return plain | {key: type(value)(0) for key, value in drafts.items()}  # a number, or false


def _cache_name(backbone: nn.Module) -> str:
    """Returns the parameter of a model's pass that takes a cache: Mamba's has a name of its own."""
    parameters = inspect.signature(backbone.forward).parameters
    return "cache_params" if "cache_params" in parameters else "past_key_values"
