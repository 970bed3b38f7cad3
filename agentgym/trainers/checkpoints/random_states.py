"""The process's own random number generators, which a user's code may draw from without a seed of its own.

Nothing in this package uses them: its seeds follow from the run, the step and the position.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from agentgym.types import JSON

__all__ = ["random_states", "seed_random", "set_random_states"]


def seed_random(seed: int) -> None:
    """Seeds the generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, JSON]:
    """Returns the states of `random`, `numpy.random` and torch, with torch's generator on every GPU in use."""
    version, inner, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": [version, list(inner), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in cuda],
    }


def set_random_states(states: Mapping[str, JSON]) -> None:
    """Restores the states; GPUs that the process lacks are left out."""
    version, inner, gauss = cast(list[JSON], states["python"])
    random.setstate((version, tuple(cast(list[int], inner)), gauss))
    name, keys, position, has_gauss, cached = cast(list[JSON], states["numpy"])
    state = (name, np.array(keys, dtype=np.uint32), position, has_gauss, cached)
    np.random.set_state(cast("tuple[str, np.ndarray, int, int, float]", state))
    torch.set_rng_state(_state(cast(str, states["torch"])))
    saved = cast(list[str], states["cuda"])
    for device, text in enumerate(saved[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_state(text), device)


def _text(state: torch.Tensor) -> str:
    return bytes(state.numpy()).hex()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
