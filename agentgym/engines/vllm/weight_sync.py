"""Sends new weights to one vLLM engine, and verifies that they arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentgym.engines.protocol import WeightSync
from agentgym.engines.servers.http import HttpRefusal, check_token
from agentgym.engines.vllm.api import VllmTransport
from agentgym.engines.vllm.receiver import VllmReceiver
from agentgym.engines.weights.check import WeightCheck
from agentgym.engines.weights.transports import UpdateEnd, weight_path
from agentgym.errors import EngineError, nearest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VllmLayout", "VllmSync", "read_layout"]

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class VllmLayout:
    """The parameters that an engine's workers hold."""

    vocab_size: int
    num_ranks: int
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes by published name; with several ranks, those of one rank's share."""
    dtype: str
    """The dtype of the first weight: `float32`."""
    device: str
    """The device of the workers: `cpu`, `cuda`."""
    seeds: bool
    """True if requests may have seeds: vLLM 0.32 on CPU dies if the prompt of a seeded one is read in several steps."""


async def read_layout(engine: VllmTransport) -> VllmLayout:
    """Asks the engine's workers for their layout.

    Raises EngineError if they lack our extension, or return other logprobs.
    """
    try:
        (answer, *_) = await engine.call("agentgym_layout")
        weights, mode = answer["weights"], answer["logprobs"]
        layout = VllmLayout(
            vocab_size=int(answer["vocab_size"]),
            num_ranks=int(answer["ranks"]),
            shapes={str(name): tuple(int(size) for size in shape) for name, shape, _ in weights},
            dtype=str(weights[0][2]),
            device=str(answer["device"]),
            seeds=bool(answer["seeds"]),
        )
    except (HttpRefusal, KeyError, TypeError, ValueError, IndexError) as error:
        check_token(error, engine.name)
        raise EngineError(
            f"{engine.name} is not a vLLM server that reports its weights ({error}). Start one with"
            " VLLM_SERVER_DEV_MODE=1, --enable-scale-out and"
            " --worker-extension-cls agentgym.engines.vllm.worker_extension.WeightWorker (a file that needs nothing"
            " else of agentgym), or have agentgym start it"
        ) from error
    if mode != "processed_logprobs":
        raise EngineError(
            f"{engine.name} gives {mode}, which are not those of the distribution that it samples from: start it with"
            " --logprobs-mode processed_logprobs"
        )
    return layout


class VllmSync:
    """The weights of one engine, as far as the trainer knows them."""

    def __init__(self, engine: VllmTransport, layout: VllmLayout, path: str, max_bytes: int) -> None:
        self.engine = engine
        self.layout = layout
        self._path = weight_path(path, VllmReceiver(engine, layout.num_ranks), max_bytes)
        self._check = WeightCheck(engine.name, is_exact=layout.num_ranks == 1)

    def wanted_tensors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors in the engine's dtype, without an output head that equals the embedding.

        Raises EngineError that names what is missing, unknown or of another shape; nothing is sent then.
        """
        # Imported here because only new weights need torch.
        from agentgym.engines.weights.buckets import as_dtype, fused_name

        shapes = self.layout.shapes
        tensors = dict(weights)
        if _HEAD not in shapes and _HEAD in tensors and _EMBEDDING in tensors:
            if not tensors[_HEAD].equal(tensors[_EMBEDDING]):
                raise EngineError(
                    f"{_HEAD!r} differs from the embedding, and the model of {self.engine.name} ties them"
                )
            del tensors[_HEAD]
        parts = {name: whole for name in shapes.keys() - tensors.keys() if (whole := fused_name(name)) in tensors}
        if missing := sorted(shapes.keys() - tensors.keys() - parts.keys()):
            if "experts" in missing[0]:
                raise EngineError(
                    f"{self.engine.name} stores the experts of a mixture in a form of its own ({missing[0]!r}), which"
                    " takes no new weights: sample in process or with SGLang"
                )
            raise EngineError(
                f"the update leaves out {len(missing)} of {len(shapes)} tensors of {self.engine.name}, the first is"
                f" {missing[0]!r}: send the whole model"
            )
        if unknown := sorted(tensors.keys() - shapes.keys() - set(parts.values())):
            hint = nearest(unknown[0], shapes)
            raise EngineError(f"{self.engine.name} has no tensor {unknown[0]!r} ({len(unknown)} are unknown){hint}")
        for name, shape in shapes.items():
            if name in parts:
                continue
            if self.layout.num_ranks == 1 and tuple(tensors[name].shape) != shape:
                raise EngineError(f"tensor {name!r} has shape {tuple(tensors[name].shape)}, the engine's has {shape}")
        return as_dtype(tensors, self.layout.dtype)

    async def load(self, weights: Mapping[str, Tensor], version: int) -> WeightSync:
        """Sends all tensors; the engine must be paused. Raises EngineError if the engine refuses one."""
        return await self._path.load(weights, UpdateEnd(version, flush=False))

    async def close(self) -> None:
        """Leaves what was joined for sending."""
        await self._path.close()

    async def verify(self, weights: Mapping[str, Tensor], version: int) -> str:
        """Returns the checksum of the engine's own parameters, after comparing each with what was sent.

        Raises EngineError that names the first tensor that did not arrive.
        """
        from agentgym.engines.weights.buckets import fused_digests, fused_sums, overall_digest

        server_sums: dict[str, str] = {}
        is_on_cpu = self.layout.device == "cpu"  # elsewhere the bytes would have to be copied here first
        for part in await self.engine.call("agentgym_digests" if is_on_cpu else "agentgym_sums"):
            server_sums |= part
        self._check.compare(fused_digests(weights) if is_on_cpu else fused_sums(weights), server_sums, version)
        return overall_digest(server_sums)
