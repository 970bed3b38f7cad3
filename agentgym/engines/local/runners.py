"""The choice of what computes the in-process engine's steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

from agentgym.engines.local.decoder_step import DecoderStep
from agentgym.engines.local.kernels.slot_attention import attends_compiled
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.step import StepRunner
from agentgym.engines.local.transformers_step import TransformersStep
from agentgym.model.decoder import Decoder
from agentgym.model.transformers_model import TransformersModel

if TYPE_CHECKING:
    from agentgym.engines.local.graphed_step import GraphedStep

__all__ = ["Runner", "make_runner"]

_log = logging.getLogger(__name__)

Runner: TypeAlias = "StepRunner | DecoderStep | GraphedStep | TransformersStep"
"""The parts of an engine that compute its steps."""


def make_runner(model: Decoder | TransformersModel, cache: SlotCache, *, compiles: bool = False) -> Runner:
    """Returns what runs the steps of a model over a cache: one function of C++ for a decoder if it `compiles`.

    If that fails, a warning gives the reason. On a GPU the steps of the fast decoder run as CUDA graphs, if Triton is
    there.
    """
    if isinstance(model, TransformersModel):
        return TransformersStep(model, cache)
    if model.embed.is_cuda and attends_compiled(model.embed):
        from agentgym.engines.local.graphed_step import GraphedStep  # needs Triton

        return GraphedStep(model, cache)
    if compiles:
        try:
            return DecoderStep(model, cache)
        except OSError as error:  # a compiler is not needed to continue
            reason = " ".join(str(error).split())[:300]
            _log.warning("the engine's step could not be compiled and runs uncompiled, slower: %s", reason)
    return StepRunner(model, cache)
