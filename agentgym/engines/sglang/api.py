"""SGLang's native interface: the requests to `/generate`, and the meaning of its answers."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any, Protocol

import numpy as np

from agentgym.engines.protocol import Completion, FinishReason, Sampling
from agentgym.engines.servers.http import MALFORMED
from agentgym.errors import EngineError
from agentgym.routed_experts import RoutedExperts

__all__ = ["SglangTransport", "generate_payload", "read_experts", "read_sglang_completion", "read_spans"]


class SglangTransport(Protocol):
    """The connection to one SGLang engine: over HTTP, or in this process."""

    @property
    def name(self) -> str:
        """The engine's name in an error message."""

    @property
    def gpus(self) -> Sequence[str] | None:
        """The GPUs that it sees, its own first; None if they are unknown."""

    async def post(self, path: str, payload: Mapping[str, object], *, timeout_s: float | None = None) -> Any:
        """Returns the answer of the endpoint `path`; raises HttpRefusal or HttpUnreachable."""

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Returns the answer of the endpoint `path`; raises HttpRefusal or HttpUnreachable."""

    def stream(self, path: str, payload: Mapping[str, object], *, timeout_s: float | None = None) -> AsyncIterator[Any]:
        """Yields the pieces of the answer of `path`, each the whole so far; raises as `post` does."""

    async def close(self) -> None:
        """Disconnects from the engine, and ends it if it is ours."""


def generate_payload(
    prompt_ids: Sequence[int], sampling: Sampling, *, rid: str, cache_key: str | None, lora: str | None
) -> dict[str, object]:
    """Returns the request for one reply.

    Every sampling parameter is given: a server takes a missing one from the model's generation_config.json, and then
    samples from another distribution than expected. `cache_key` separates the prefix cache by policy version.
    """
    params: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "skip_special_tokens": False,
        "sampling_seed": sampling.seed & 0x7FFFFFFF,
    }
    if sampling.grammar:
        params["structural_tag"] = sampling.grammar
    if sampling.stop_ids:
        params["stop_token_ids"] = list(sampling.stop_ids)
    else:
        params["ignore_eos"] = True
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    payload: dict[str, object] = {
        "input_ids": tuple(prompt_ids),
        "sampling_params": params,
        "return_logprob": True,
        "rid": rid,
    }
    if cache_key is not None:
        payload["extra_key"] = cache_key
    if lora is not None:
        payload["lora_path"] = lora
    return payload


def read_sglang_completion(
    answer: Any, *, name: str, num_prompt_ids: int, version: int, one_version: bool = False
) -> Completion:
    """Returns the reply in an answer of `/generate`; raises EngineError for one that cannot be trusted.

    `version` is the policy version of answers that report none, and with `one_version` of every answer: an adapter
    stays with its request, whatever the version of the weights below it.
    """
    try:
        meta = answer["meta_info"]
        finish = (meta["finish_reason"] or {"type": "abort"})["type"]
        if finish == "abort" and not answer.get("output_ids"):
            return Completion((), (), (), "abort")  # it had not begun, and reports nothing else
        ids = [index(token) for token in answer["output_ids"]]
        pairs = meta["output_token_logprobs"]
        logprobs = [float(pair[0]) for pair in pairs]
        sampled = [index(pair[1]) for pair in pairs]
        num_read = index(meta.get("prompt_tokens", num_prompt_ids))  # missing for a request that waited when it ended
    except MALFORMED as error:
        raise EngineError(f"{name} gave an answer without {error!s}: is it a native SGLang server?") from error
    if len(logprobs) != len(ids):
        raise EngineError(f"{name} returned {len(ids)} ids and {len(logprobs)} logprobs: the reply is not used")
    if sampled != ids:
        raise EngineError(f"{name} returned logprobs of other ids than those it says it sampled")
    if num_read != num_prompt_ids:
        raise EngineError(
            f"{name} read {num_read} prompt ids where {num_prompt_ids} were sent: it adds or drops some (a BOS token?)"
        )
    reason: FinishReason = finish if finish in ("stop", "length") else "abort"
    spans = None if one_version else meta.get("weight_versions")
    versions = read_spans(spans, len(ids), name=name, version=version)
    return Completion(tuple(ids), tuple(logprobs), versions, reason)


def read_experts(answer: Any, shape: tuple[int, int], num_tokens: int, *, name: str) -> RoutedExperts | None:
    """Returns the experts of `num_tokens` tokens in an answer, by `shape` layers and choices; None if it began none.

    Raises EngineError if the server records none, or those of other tokens.
    """
    text = answer["meta_info"].get("routed_experts")
    if not text:
        if not answer.get("output_ids"):
            return None
        raise EngineError(f"{name} reports no experts: start it with --enable-return-routed-experts")
    try:
        experts = np.frombuffer(b64decode(text), "<i4")
    except MALFORMED as error:
        raise EngineError(f"{name} reports experts that cannot be read: {error}") from error
    if experts.size != num_tokens * shape[0] * shape[1]:
        shape_text = f"{num_tokens} tokens x {shape[0]} layers x {shape[1]}"
        raise EngineError(f"{name} returned {experts.size} experts where {shape_text} were expected")
    return RoutedExperts.of(experts.reshape(num_tokens, *shape))


def read_spans(spans: Any, num_ids: int, *, name: str, version: int) -> tuple[int, ...]:
    """Returns one policy version per id, from `meta_info.weight_versions`.

    It is `version` for all ids without `spans`: a stream reports them at its end, which it lacks if it broke off.
    """
    if not spans:
        return (version,) * num_ids
    versions: list[int] = []
    for span in spans if isinstance(spans, list) else [spans]:
        try:
            span_version, end = str(span["version"]), index(span["end"])
            number = int(span_version) if span_version.isdecimal() and len(span_version) < 19 else -1
        except MALFORMED as error:
            raise EngineError(f"{name} does not say which weights sampled a reply: {spans!r:.200}") from error
        if number < 0:
            raise EngineError(
                f"{name} sampled with weights of version {span_version!r}, which is none of ours:"
                " another client updates them"
            )
        versions += [number] * (min(end, num_ids) - len(versions))
    if any(later < earlier for earlier, later in pairwise(versions)):
        raise EngineError(
            f"{name} went back from newer weights to older ones in one reply: another client updates them"
        )
    if len(versions) != num_ids:
        raise EngineError(f"{name} names the weights of {len(versions)} ids of a reply of {num_ids}")
    return tuple(versions)
