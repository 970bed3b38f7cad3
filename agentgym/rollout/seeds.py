"""Seeds that depend on what is sampled and never on which worker samples it."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["derive"]


def derive(run_seed: int, *path: int | str) -> int:
    """Returns a 63-bit seed `H(run_seed, *path)`; a rollout's path is step, group, member, turn.

    Unequal paths give unrelated seeds: `derive(0, "1", 2)`, `derive(0, 1, 2)` and `derive(0, "12")` all differ.
    """
    digest = blake2b(repr((run_seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
