"""Counts what a step of the in-process engine does on a GPU, without one: decoding, and reading a prompt.

As `meta.py` does of a learner's passes, and by its rates: the real code runs on torch's meta device, and every operator
is counted. Kernels of attention are counted by the keys they read, once for each decoded token and each tile of a
prompt, and by their products, at the speed that an H200 reached with them. A step of the fast decoder is a CUDA graph,
so that launches take the processor no time; a model of transformers launches each operator.

    python benchmarks/meta_steps.py [--shapes 0.6B 8B 32B]

What was measured on an H200 (`gpu/h200/sampling.jsonl`) is printed beside. Its prompts were read when a step still
launched a program for each row; the prediction leaves those out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from meta import Counter, Counts, model_of
from shapes import PUBLISHED
from torch import Tensor

from agentgym.engines.local import transformers_step
from agentgym.engines.local.kernels.gpu_tiles import tile_tokens
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows, pad_rows

TILE_FLOPS_S = 70e12
"""The speed of a prompt of 1,024 after another on an H200, without the time of its empty programs."""
MEASURED = {"decode 1 at 1024": 1.46e-3, "decode 128 at 1024": 5.0e-3, "prompt of 1024": 6.88e-3}
"""Seconds of a step of 0.6 B, by the fast decoder."""
KERNELS = "agentgym.engines.local.kernels"


def decode(num_slots: int, position: int) -> Rows:
    """Returns the rows of a step that decodes one token in each slot."""
    slot_N = np.arange(num_slots)
    return Rows(slot_N, np.full(num_slots, position), num_slots, (), slot_N)


def prompt(length: int) -> Rows:
    """Returns the rows of a step that reads a prompt."""
    position_N = np.arange(length)
    return Rows(position_N * 0, position_N, 0, ((0, 0, length),), position_N[-1:])


def steps() -> dict[str, Rows]:
    """Returns the steps of the table by name."""
    cases = {
        f"decode {size} at {position}": decode(size, position)
        for size, position in ((1, 1024), (128, 1024), (64, 16_384))
    }
    return cases | {f"prompt of {length}": prompt(length) for length in (1024, 8192)}


def count_attention(counter: Counter, rows: Rows, q_NHD: Tensor, kv: Tensor) -> None:
    """Adds what attention to a layer's `[2, S, K, W, D]` reads and computes."""
    num_heads, width = q_NHD.shape[1:]
    decoded = int((rows.position_N[: rows.num_decode] + 1).sum())
    pairs, num_read = decoded, decoded
    tokens = tile_tokens(num_heads // kv.shape[2])
    for _, first, size in rows.extends:
        ends = np.minimum(np.arange(tokens, size + tokens, tokens), size) + first
        pairs += size * first + size * (size + 1) // 2
        num_read += int(ends.sum())
    moved = 2.0 * num_read * kv.shape[2] * kv.shape[4] * kv.element_size() + 2.0 * q_NHD.numel() * q_NHD.element_size()
    counter.add(moved, 4.0 * pairs * num_heads * width, TILE_FLOPS_S)


@contextmanager
def kernels_of_an_engine(counter: Counter, rows: Rows) -> Iterator[None]:
    """Replaces the kernels of Triton by their counts."""

    def rotate_and_store(flat_NO: Tensor, kv: Tensor, *_: Any) -> Tensor:
        counter.add(2.0 * flat_NO.numel() * flat_NO.element_size())
        num_heads = flat_NO.shape[1] // kv.shape[4] - 2 * kv.shape[2]
        return _empty(flat_NO, len(flat_NO), num_heads, kv.shape[4])

    def attend_stored(q_NHD: Tensor, kv: Tensor, *_: Any) -> None:
        count_attention(counter, rows, q_NHD, kv)

    def gate(flat_NF: Tensor) -> Tensor:
        counter.add(1.5 * flat_NF.numel() * flat_NF.element_size())
        return _empty(flat_NF, len(flat_NF), flat_NF.shape[1] // 2)

    modules = {
        f"{KERNELS}.gpu_attention": {"attend_stored": attend_stored},
        f"{KERNELS}.gpu_rows": {"rotate_and_store": rotate_and_store},
        "agentgym.model.ops.gpu_rows": {"gate": gate},
    }
    with ExitStack() as stack:
        stack.enter_context(patch.dict(sys.modules))
        sys.modules.pop("agentgym.engines.local.graphed_step", None)
        for name, functions in modules.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(functions)
        properties = SimpleNamespace(multi_processor_count=132)
        stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda _: properties))
        stack.enter_context(patch.object(transformers_step, "SlotAttention", _attention_of(counter)))
        yield


def _empty(like: Tensor, *shape: int) -> Tensor:
    with torch.utils._python_dispatch._disable_current_modes():
        return like.new_empty(shape)


def _attention_of(counter: Counter) -> Callable[..., Any]:
    class Attention:
        """Stands for `SlotAttention`."""

        def __init__(self, cache: SlotCache, rows: Rows, **_: Any) -> None:
            self.position_N = torch.from_numpy(pad_rows(rows.position_N)).to(cache.kv[0].device)
            self._rows = rows

        def attend(self, kv: Tensor, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, *_: Any) -> Tensor:
            counter.add(2.0 * (k_NKD.numel() + v_NKD.numel()) * k_NKD.element_size())
            count_attention(counter, self._rows, q_NHD, kv)
            return _empty(q_NHD, *q_NHD.shape[:2], v_NKD.shape[2])

    return Attention


def count_engine_step(shape: str, backend: str, rows: Rows) -> Counts:
    """Returns the counts of a step of a model in bfloat16, from ids to logits."""
    model = model_of(shape, backend)
    window = int(rows.position_N.max()) + 64
    cache = SlotCache(model, int(rows.slot_N.max()) + 1, window)
    counter = Counter(0)
    with kernels_of_an_engine(counter, rows), torch.inference_mode():
        if backend == "fast":
            from agentgym.engines.local.graphed_step import GraphedStep

            step: Any = GraphedStep(model, cache)
            step._records = False
        else:
            step = transformers_step.TransformersStep(model, cache)
        with counter:
            step.forward(rows)
    return counter.counts


def show(shape: str, backend: str, name: str, counts: Counts) -> None:
    """Prints a line of the table."""
    seconds = counts.gpu_s if backend == "fast" else counts.predicted_s
    measured = MEASURED.get(name) if (shape, backend) == ("0.6B", "fast") else None
    note = f"{measured * 1e3:9.2f}" if measured else ""
    size = f"{counts.launches:7,} {counts.bytes / 1e9:8.2f} {counts.flops / 1e12:8.3f}"
    print(f"{shape:14} {backend:13} {name:20} {size} {seconds * 1e3:8.2f} {note}", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "8B", "32B", "qwen3-30b-a3b"])
    options = parser.parse_args(words)
    print(f"{'':49} {'kernels':>7} {'GB':>8} {'TFLOP':>8} {'ms':>8} {'measured':>9}")
    for shape in options.shapes:
        for backend in ("transformers",) if shape in PUBLISHED else ("fast", "transformers"):
            for name, rows in steps().items():
                show(shape, backend, name, count_engine_step(shape, backend, rows))


if __name__ == "__main__":
    main()
