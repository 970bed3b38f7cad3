"""The redundant parts of a stored episode: masks as runs and digests of its numbers, to detect later damage."""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

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
    ids, sources, logprobs, versions = array("q"), bytearray(), array("d"), array("q")
    for span in spans:
        ids.extend(span["ids"])
        sources += bytes([_SOURCES.index(span["source"])]) * len(span["ids"])
        logprobs.extend(span.get("logprobs") or ())
        versions.extend(span.get("policy_versions") or ())
    experts = [json.dumps(span["experts"], sort_keys=True) for span in spans if "experts" in span]
    digest = blake2b(digest_size=16)
    for values in (ids, sources, logprobs, versions):
        digest.update(_little_endian(values))
    digest.update("".join(experts).encode())
    return digest.hexdigest()


def credit_digest(rewards: Sequence[float | None], advantages: Sequence[Sequence[float]] | None) -> str:
    """Returns a 16-byte BLAKE2b digest, in hex, of the rewards of an episode's turns and the advantages of its ids.

    Hashed in this order, little-endian: the number of turns (int64), every turn's reward (float64, NaN for none), the
    number of rows with advantages (int64, -1 if there are none at all), and for each its length (int64) and its
    advantages (float64).
    """
    digest = blake2b(digest_size=16)

    def add(values: Sequence[float | None], kind: str) -> None:
        numbers = [math.nan if value is None else value for value in values] if None in values else values
        digest.update(_little_endian(array(kind, numbers)))

    add([len(rewards)], "q")
    add(rewards, "d")
    add([-1 if advantages is None else len(advantages)], "q")
    for row in advantages or ():
        add([len(row)], "q")
        add(row, "d")
    return digest.hexdigest()


def _little_endian(values: array[Any] | bytearray) -> array[Any] | bytearray:
    """Returns the numbers, whose order of bytes is changed in place if this machine has another one."""
    if sys.byteorder == "big" and isinstance(values, array):
        values.byteswap()
    return values
