"""The promises of a batch about its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["batch_faults"]

# Shape suffixes: N entries, B rows.


def batch_faults(tensors: Mapping[str, Tensor], seqlens: Sequence[int]) -> Iterable[tuple[Tensor, str]]:
    """Yields each possible fault of a batch's tensors `[N]` as a scalar bool tensor with its message."""
    lengths_B = torch.tensor(seqlens, dtype=torch.int64, device=tensors["ids_N"].device)
    start_N = torch.repeat_interleave(lengths_B.cumsum(0) - lengths_B, lengths_B)
    place_N = torch.arange(len(start_N), device=start_N.device)
    inside_N = tensors["position_N"] > 0
    yield (tensors["position_N"] != place_N - start_N).any(), "positions count from 0 within each row"
    for name in ("row_N", "trajectory_N"):
        index_N = tensors[name]
        yield ((index_N != index_N.roll(1)) & inside_N).any(), f"{name} is the same number along each row"
    for name, values_N in tensors.items():
        if values_N.dtype != torch.float32:
            continue
        yield (~values_N.isfinite()).any(), f"{name} holds a number that is not finite"
        yield (values_N[~tensors["mask_N"]] != 0).any(), f"{name} is 0 wherever the target is not trained"
    yield ((tensors["old_logp_N"] > 1e-6) | (tensors["sampled_logp_N"] > 1e-6)).any(), "logprobs are at most 0"
    yield (tensors["correction_N"] < 0).any(), "corrections are at least 0"
    yield (tensors["weight_N"][tensors["mask_N"]] <= 0).any(), "weights are above 0 wherever the target is trained"
    yield (
        ((tensors["policy_version_N"] >= 0) != tensors["mask_N"]).any(),
        "policy versions are given for exactly the trained targets",
    )
    yield (
        ((tensors["reply_version_N"] >= 0) != tensors["mask_N"]).any(),
        "reply versions are given for exactly the trained targets",
    )
    yield (tensors["reply_version_N"] > tensors["policy_version_N"]).any(), "no token is older than its reply"
    joined_N = tensors["ids_N"][1:] != tensors["target_N"][:-1]
    yield (joined_N & inside_N[1:]).any(), "within a row, each input is the target before it"
