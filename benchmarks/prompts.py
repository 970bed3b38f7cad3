"""CPU seconds to read one prompt: the in-process engine, whose bits depend on nothing else, and transformers' sdpa.

Both compute the logits of the last token and keep keys and values. The engine reads in steps of 512 tokens. Rounds are
interleaved; the table has the least, the median and the most seconds, and the ratio of the medians. One thread a side.

    python benchmarks/prompts.py [--size 1M | 60M] [--tokens 256 1024 4096 8192 16384] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
import torch
from models import BACKENDS
from shapes import SHAPES
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentgym.engines.local.kernels.row_products import keep_packed
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows
from agentgym.engines.local.runners import Runner, make_runner
from agentgym.model.decoder import Decoder
from agentgym.model.policy import load_policy
from agentgym.model.transformers_model import TransformersModel

STEP_TOKENS = 512
AGREEMENT = 1e-3  # nats between the logprobs of both sides


@torch.inference_mode()
def read(runner: Runner, ids: torch.Tensor) -> torch.Tensor:
    """Returns the logits `[V]` after a prompt that is read into the first slot."""
    runner.cache.tokens_SW[0, : len(ids)] = ids.numpy()
    for first in range(0, len(ids), STEP_TOKENS):
        number = min(STEP_TOKENS, len(ids) - first)
        positions = np.arange(first, first + number)
        rows = Rows(np.zeros_like(positions), positions, 0, ((0, first, number),), np.array([number - 1]))
        logits_1V = runner.forward(rows)
    return logits_1V[0]


def make_sides(folder: Path, longest: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns a function from the ids of a prompt to the logits of the last token, by the name of the side."""
    sides: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    for backend in BACKENDS:
        model = load_policy(folder, backend=backend).requires_grad_(False)
        assert isinstance(model, Decoder | TransformersModel)
        keep_packed(model.parameters())
        runner = make_runner(model, SlotCache(model, 1, longest), compiles=backend == "fast")
        sides[backend] = lambda ids, runner=runner: read(runner, ids)
    sdpa = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    sides["sdpa"] = torch.inference_mode()(lambda ids: sdpa(ids[None], use_cache=True, logits_to_keep=1).logits[0, -1])
    return sides


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="1M")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1_024, 4_096, 8_192, 16_384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    shape = replace(SHAPES[options.size], context_window=max(options.tokens) + STEP_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        shape.save(Path(folder))
        sides = make_sides(Path(folder), max(options.tokens))
    seconds: dict[tuple[int, str], list[float]] = {}
    print("tokens", *(f"{name:>30}" for name in sides))
    for tokens in options.tokens:
        ids = torch.randint(shape.vocab_size, (tokens,), generator=torch.Generator().manual_seed(tokens))
        logprobs = [side(ids).log_softmax(-1) for side in sides.values()]
        assert all((other - logprobs[-1]).abs().max() < AGREEMENT for other in logprobs), "the sides disagree"
        for _ in range(options.rounds):
            for name, side in sides.items():
                started = time.process_time()
                side(ids)
                seconds.setdefault((tokens, name), []).append(time.process_time() - started)
        reference = statistics.median(seconds[tokens, "sdpa"])
        cells = []
        for name in sides:
            spent = sorted(seconds[tokens, name])
            middle = statistics.median(spent)
            cells.append(f"{spent[0]:8.3f} {middle:7.3f} {spent[-1]:7.3f} {middle / reference:5.2f}x")
        print(f"{tokens:>6}", *cells, flush=True)
    if options.json:
        print(
            json.dumps([{"tokens": tokens, "side": side, "cpu_s": spent} for (tokens, side), spent in seconds.items()])
        )


if __name__ == "__main__":
    main()
