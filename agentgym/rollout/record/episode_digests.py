"""The redundant parts of a stored episode: masks as runs and digests of its numbers, to detect later damage."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

import numpy as np

__all__ = ["credit_digest", "is_trained", "mask_runs", "row_digest"]

_SOURCES = ("prompt", "policy", "env")


def is_trained(span: Mapping[str, Any]) -> bool:
    """Returns whether the loss counts the ids of a stored span."""
    return span["source"] == "policy" and not span.get("excluded")


def mask_runs(spans: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Returns the mask of a stored row's spans as `[bit, length]` runs.

    >>> mask_runs([{"source": "prompt", "ids": [5, 6]}, {"source": "policy", "ids": [7]}])
    [[0, 2], [1, 1]]
    """
    lengths = [(int(is_trained(span)), len(span["ids"])) for span in spans]
    runs = groupby((entry for entry in lengths if entry[1]), key=lambda entry: entry[0])
    return [[bit, sum(length for _, length in run)] for bit, run in runs]


def row_digest(spans: Sequence[Mapping[str, Any]]) -> str:
    """Returns a 16-byte BLAKE2b digest, in hex, of a stored row's ids, sources, logprobs and policy versions.

    Hashed in this order, little-endian: every id (int64), its source (uint8: prompt 0, policy 1, env 2), every logprob
    (float64, as stored), every version (int64). The experts of a mixture, as stored, follow as text if there are any.
    """
    digest = blake2b(digest_size=16)
    for span in spans:
        digest.update(np.asarray(span["ids"], "<i8").tobytes())
    for span in spans:
        digest.update(bytes([_SOURCES.index(span["source"])]) * len(span["ids"]))
    for name, kind in (("logprobs", "<f8"), ("policy_versions", "<i8")):
        for span in spans:
            digest.update(np.asarray(span.get(name) or (), kind).tobytes())
    for span in spans:
        if "experts" in span:
            digest.update(json.dumps(span["experts"], sort_keys=True).encode())
    return digest.hexdigest()


def credit_digest(rewards: Sequence[float | None], advantages: Sequence[Sequence[float]] | None) -> str:
    """Returns a 16-byte BLAKE2b digest, in hex, of the rewards of an episode's turns and the advantages of its ids.

    Hashed in this order, little-endian: the number of turns (int64), every turn's reward (float64, NaN for none), the
    number of rows with advantages (int64, -1 if there are none at all), and for each its length (int64) and its
    advantages (float64).
    """
    digest = blake2b(digest_size=16)

    def add(values: Sequence[float | None], kind: str) -> None:
        known = [math.nan if value is None else value for value in values] if None in values else values
        digest.update(np.asarray(known, kind).tobytes())

    add([len(rewards)], "<i8")
    add(rewards, "<f8")
    add([-1 if advantages is None else len(advantages)], "<i8")
    for row in advantages or ():
        add([len(row)], "<i8")
        add(row, "<f8")
    return digest.hexdigest()
