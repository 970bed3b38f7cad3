"""vLLM's token-in, token-out interface: the request for one reply, and the meaning of an answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, Protocol

from agentgym.engines.protocol import Completion, FinishReason, Sampling
from agentgym.engines.servers.http import MALFORMED
from agentgym.errors import EngineError

__all__ = [
    "Holding",
    "VllmReply",
    "VllmTransport",
    "join_pieces",
    "read_reply",
    "read_vllm_completion",
    "sampling_params",
]

Holding = Literal["abort", "keep", "preempt"]
"""The effect of a pause on requests in flight: ends them, keeps them as they are, or keeps them and drops their
cache."""
MAX_DIGITS = 18
"""The most digits of a policy version."""
_NO_LOGPROB = -9999.0
"""The value that a server writes for a logprob that is not a number."""


@dataclass(frozen=True, slots=True)
class VllmReply:
    """One reply of vLLM: `VllmReply((9, 2), (9, 2), (-0.2, -0.1), "stop", [("0", 0, 2)])`."""

    ids: tuple[int, ...]
    sampled: tuple[int, ...]
    """The ids that the logprobs are reported for."""
    logprobs: tuple[float, ...]
    finish_reason: str | None
    """The finish reason; None for a reply whose end did not arrive."""
    spans: Sequence[tuple[str, int, int]] | None = None
    """Spans of (weight version, start, end) over the ids; None if vLLM reports none."""
    num_prompt_ids: int | None = None


class VllmTransport(Protocol):
    """The connection to one vLLM engine: over HTTP, or in this process.

    Methods raise HttpRefusal or HttpUnreachable.
    """

    @property
    def name(self) -> str:
        """The engine's name in an error message."""

    @property
    def gpus(self) -> Sequence[str] | None:
        """The GPUs that it sees, its own first; None if they are unknown."""

    async def context_window(self) -> int:
        """Returns the most tokens that prompt and reply may have together."""

    async def generate(
        self, prompt_ids: Sequence[int], params: Mapping[str, object], *, rid: str, cache_salt: str
    ) -> VllmReply:
        """Samples one reply under the request id `rid`; requests of different salts share no cache."""

    async def abort(self, rid: str | None) -> None:
        """Ends the request `rid`, or all of them; each returns with what it has."""

    async def pause(self, holding: Holding) -> None:
        """Stops at a token boundary."""

    async def resume(self) -> None:
        """Continues after `pause`."""

    async def sleep(self) -> None:
        """Frees the GPU's memory, with the weights in the CPU's; nothing is in flight."""

    async def wake(self, parts: Sequence[str]) -> None:
        """Takes memory back, of `weights` and `kv_cache`."""

    async def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Drops cached prefixes, with `preempt` those of requests in flight too; returns False if they prevent it."""

    async def set_version(self, version: str) -> None:
        """Names the weights; tokens sampled from now on have this version."""

    async def version(self) -> str:
        """Returns the name of the weights."""

    async def call(self, method: str, *args: str) -> list[Any]:
        """Returns each worker's answer to a method of `worker_extension.WeightWorker`."""

    async def is_alive(self) -> bool:
        """Returns whether the engine answers at all."""

    async def close(self) -> None:
        """Disconnects from the engine, and ends it if it is ours."""


def sampling_params(sampling: Sampling) -> dict[str, object]:
    """Returns vLLM's sampling parameters for one reply.

    Only `stop_ids` and `stop` end it: the model's own end token is among them, or does not count.
    """
    params: dict[str, object] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed & 0x7FFFFFFFFFFFFFFF,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,  # those of the sampled ids only
        "detokenize": False,
    }
    if sampling.stop:  # it looks for them in the text that it shows
        params |= {"stop": list(sampling.stop), "detokenize": True, "skip_special_tokens": False}
    if sampling.grammar:
        params["structured_outputs"] = {"structural_tag": sampling.grammar}
    return params


def read_reply(answer: Any, *, name: str) -> VllmReply:
    """Returns the reply in an answer of `/inference/v1/generate`, whole or one piece of a stream.

    Raises EngineError for another answer.
    """
    try:
        choice = answer["choices"][0]
        ids = tuple(index(token) for token in choice["token_ids"] or ())
        entries = (choice["logprobs"] or {}).get("content") or ()
        spans = choice.get("weight_versions")
        usage = answer.get("usage") or {}
        return VllmReply(
            ids,
            tuple(index(entry["token_id"]) for entry in entries),
            tuple(float(entry["logprob"]) for entry in entries),
            choice["finish_reason"],
            None
            if spans is None
            else [(str(span["version"]), index(span["start"]), index(span["end"])) for span in spans],
            usage.get("prompt_tokens"),
        )
    except MALFORMED as error:
        raise EngineError(
            f"{name} gave an answer without {error!s} ({str(answer)[:200]}): a vLLM server from 0.32 on with"
            " --enable-scale-out was wanted"
        ) from error


def join_pieces(pieces: Sequence[VllmReply]) -> VllmReply:
    """Joins the pieces of a reply."""
    last = pieces[-1]
    return VllmReply(
        tuple(token for piece in pieces for token in piece.ids),
        tuple(token for piece in pieces for token in piece.sampled),
        tuple(value for piece in pieces for value in piece.logprobs),
        last.finish_reason,
        last.spans,
        next((piece.num_prompt_ids for piece in pieces if piece.num_prompt_ids is not None), None),
    )


def read_vllm_completion(reply: VllmReply, *, name: str, num_prompt_ids: int, version: int) -> Completion:
    """Returns the reply with one version per id; raises EngineError for one that cannot be trusted.

    `version` is the policy version of a reply that reports none.
    """
    ids, logprobs = reply.ids, reply.logprobs
    if len(logprobs) != len(ids):
        raise EngineError(f"{name} returned {len(ids)} ids and {len(logprobs)} logprobs: the reply is not used")
    if reply.sampled != ids:
        raise EngineError(f"{name} returned logprobs of other ids than those it says it sampled")
    if reply.num_prompt_ids not in (None, num_prompt_ids):
        raise EngineError(f"{name} read {reply.num_prompt_ids} prompt ids where {num_prompt_ids} were sent")
    if not all(math.isfinite(value) and value > _NO_LOGPROB for value in logprobs):
        raise EngineError(f"{name} gave a logprob that is not a number: the weights of version {version} have diverged")
    reason: FinishReason = "abort"
    if reply.finish_reason in ("stop", "length"):
        reason = "stop" if reply.finish_reason == "stop" else "length"
    elif reply.finish_reason not in ("abort", None):
        raise EngineError(f"{name} ended a reply with {reply.finish_reason!r}")
    versions = (version,) * len(ids) if reply.spans is None else _versions(reply.spans, len(ids), name)
    return Completion(ids, logprobs, versions, reason)


def _versions(spans: Sequence[tuple[str, int, int]], num_ids: int, name: str) -> tuple[int, ...]:
    versions: list[int] = []
    for version, start, end in spans:
        if start != len(versions) or not version.isdecimal() or len(version) > MAX_DIGITS:
            raise EngineError(
                f"{name} says that id {start} was sampled with weights {version!r}, which are none of ours or not in"
                " order: another client updates them"
            )
        versions += [int(version)] * (min(end, num_ids + 1) - start)
    if len(versions) != num_ids:
        raise EngineError(f"{name} names the weights of {len(versions)} ids in a reply of {num_ids}")
    return tuple(versions)
