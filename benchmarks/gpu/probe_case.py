"""The shapes, batches and clocks that the steps of the probe share."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from shapes import PUBLISHED, shape_of
from torch import Tensor

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.pass_attention import HOOK, register_hook
from agentgym.model.transformers_model import TransformersModel
from agentgym.trainers.algorithms.aggregation import StepTotals
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.model_check.small_models import shrink
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

PEAK_FLOPS = 989e12
"""What NVIDIA promises of an H100 or H200 (SXM) in bfloat16; MFU is of this."""


@torch.no_grad()
def make_model(shape: str, device: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Draws random weights on the device; `Decoder.initialize` draws on the CPU, a minute for 4 B."""
    with torch.device(device):
        model = Decoder(shape_of(shape)).to(dtype)
    generator = torch.Generator(device=device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scale = (2 * model.num_layers) ** -0.5 if name.endswith((".out", ".down")) else 1.0
            parameter.normal_(0.0, 0.02 * scale, generator=generator)
    return model


def make_published(name: str, probe: Probe) -> TransformersModel:
    """Draws random weights of a published model that transformers computes, on the device; small ones if it is tiny."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_hook()
    kind, sizes = PUBLISHED[name]
    config = AutoConfig.for_model(kind, **sizes)
    if probe.is_tiny:
        config = AutoConfig.for_model(**{**shrink(config.to_dict()), "vocab_size": shape_of("tiny").vocab_size})
    experts = {} if probe.is_cuda else {"experts_implementation": "eager"}
    with torch.device(probe.device):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=HOOK, **experts)
    return TransformersModel(hf, config.to_dict())


def make_learner(model: Any, **config: Any) -> Learner:
    """Returns a learner that trains the model in bfloat16, 16,384 tokens a pass, unless told otherwise."""
    settings = {"micro_batch_tokens": 16_384, "device": "cpu", "dtype": "bfloat16", **config}
    return Learner(model, LearnerConfig(**settings), OptimizerConfig(learning_rate=1e-6), total_steps=100)


class Workload:
    """Rows of a step with the tokens that are trained.

    `single`: two groups of 8 replies to a prompt of 512 tokens. `turns`: 8 rows of 2,048 tokens, 60 of every 200
    trained. `long` and `verylong`: one such row of 16,384 or 32,768. The shape `tiny` has a tenth of the tokens.
    """

    def __init__(self, kind: str, shape: str, seed: int = 0) -> None:
        random, scale = np.random.default_rng(seed), 0.1 if shape == "tiny" else 1.0
        vocab_size = shape_of(shape).vocab_size
        self._chance = float(np.log(vocab_size))
        self.rows: list[np.ndarray[Any, Any]] = []
        self.trained: list[np.ndarray[Any, Any]] = []

        def size(number: int) -> int:
            return max(48, int(number * scale))

        def add(row: np.ndarray[Any, Any], trained: np.ndarray[Any, Any]) -> None:
            self.rows.append(row)
            self.trained.append(trained)

        if kind == "single":
            for _ in range(2):
                prompt = random.integers(0, vocab_size, size(512))
                for _ in range(8):
                    reply = random.integers(0, vocab_size, random.integers(size(600), size(1500)))
                    add(np.concatenate([prompt, reply]), np.arange(len(prompt) + len(reply) - 1) >= len(prompt) - 1)
            return
        num_rows, length = {"turns": (8, 2048), "long": (1, 16_384), "verylong": (1, 32_768)}[kind]
        for _ in range(num_rows):
            num_tokens = int(size(length) - random.integers(0, 40))
            add(random.integers(0, vocab_size, num_tokens), (np.arange(num_tokens - 1) - size(300)) % 200 < 60)

    @property
    def lengths(self) -> list[int]:
        """The number of entries of each row."""
        return [len(row) - 1 for row in self.rows]

    @property
    def num_trained(self) -> int:
        """The number of trained tokens."""
        return int(sum(trained.sum() for trained in self.trained))

    def batch(self, logp_M: Tensor | None = None) -> TrainingBatch:
        """Returns the batch, with logprobs of the trained tokens from the sampling; by default those of chance."""
        lengths = self.lengths
        random = np.random.default_rng(0)
        mask_N = torch.from_numpy(np.concatenate(self.trained))
        factor_N, row_N = mask_N.float(), torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        advantage_N = torch.from_numpy(random.normal(size=len(lengths))).float()[row_N] * factor_N
        old_N = -self._chance * factor_N if logp_M is None else torch.zeros(len(mask_N)).masked_scatter(mask_N, logp_M)
        version_N = torch.where(mask_N, 0, -1)
        return TrainingBatch(
            ids_N=torch.from_numpy(np.concatenate([row[:-1] for row in self.rows])),
            target_N=torch.from_numpy(np.concatenate([row[1:] for row in self.rows])),
            position_N=torch.cat([torch.arange(length) for length in lengths]),
            mask_N=mask_N,
            sampled_logp_N=old_N,
            old_logp_N=old_N,
            correction_N=factor_N,
            advantage_N=advantage_N,
            return_N=torch.zeros(len(mask_N)),
            old_value_N=torch.zeros(len(mask_N)),
            weight_N=factor_N / max(1, self.num_trained),
            policy_version_N=version_N,
            reply_version_N=version_N.clone(),
            row_N=row_N,
            trajectory_N=row_N.clone(),
            seqlens=tuple(lengths),
            totals=StepTotals(self.num_trained, len(lengths), len(lengths)),
        )

    def step_flops(self, config: DecoderConfig) -> float:
        """Returns the operations of forward and backward over whole rows: products, and attention to earlier keys."""
        q, kv = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
        weights = config.num_layers * config.width * (2 * q + 2 * kv + 3 * config.ffn_width)
        pairs = sum(length * (length + 1) // 2 for length in self.lengths)
        products = 2 * sum(self.lengths) * weights + 2 * self.num_trained * config.width * config.vocab_size
        return 3.0 * (products + 4 * q * config.num_layers * pairs)


def on_policy(learner: Learner, batch: TrainingBatch) -> TrainingBatch:
    """Returns the batch with the learner's own logprobs as those of the sampling."""
    logp_M = learner.logprobs(batch).float().cpu().clamp(max=0)
    old_N = torch.zeros(len(batch.mask_N)).masked_scatter(batch.mask_N, logp_M)
    return replace(batch, old_logp_N=old_N, sampled_logp_N=old_N)


class Probe:
    """The arguments of a step, its clock and its cases."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--shape", default="0.6B")
        parser.add_argument("--limit-s", type=float, default=120.0)
        parser.add_argument("--model", default="")
        parser.add_argument("--chat-template", default="")
        options = parser.parse_args()
        self.device: str = options.device
        self.shape: str = options.shape
        self.model: str = options.model
        self.chat_template: str = options.chat_template
        self.is_cuda = self.device.startswith("cuda")
        self.is_tiny = self.shape == "tiny"
        self._limit_s: float = options.limit_s
        self._began = time.monotonic()

    @property
    def has_time(self) -> bool:
        """True if a further case may begin."""
        return time.monotonic() - self._began < self._limit_s

    def case(self, name: str, work: Callable[[], Mapping[str, Any]], **about: Any) -> None:
        """Runs a case and prints its results, or its error, as a line of JSON."""
        line: dict[str, Any] = {"case": name, **about}
        if not self.has_time:
            print(json.dumps({**line, "skipped": "no time is left"}), flush=True)
            return
        try:
            line |= work()
        except Exception as error:  # noqa: BLE001  the boundary of a case: the others are measured nevertheless
            line |= {
                "error": f"{type(error).__name__}: {error}"[:700],
                "where": traceback.format_exc().splitlines()[-5:],
            }
        print(json.dumps(line, default=str), flush=True)
        self.free_memory()

    def free_memory(self) -> None:
        """Gives back what nothing refers to."""
        gc.collect()
        if self.is_cuda:
            with suppress(RuntimeError):  # of a kernel that failed: no further case of the process can run, and says so
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()

    def sync(self) -> None:
        """Waits for the GPU."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 3, warmup: int = 1) -> float:
        """Returns the median seconds of some calls, after others that are not counted."""
        times = []
        for number in range(repeats + warmup):
            self.sync()
            started = time.perf_counter()
            work()
            self.sync()
            times.append(time.perf_counter() - started)
            if number < warmup:
                times.clear()
        return statistics.median(times)

    def peak_gb(self) -> float | None:
        """Returns the most memory of the GPU in use since the last call or case."""
        if not self.is_cuda:
            return None
        peak = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return round(peak, 2)

    def kernels(self, work: Callable[[], object]) -> dict[str, Any]:
        """Returns the kernels of a call: how many, how long the GPU was busy, and which took longest."""
        from torch.profiler import ProfilerActivity, profile

        if not self.is_cuda:
            return {}
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            work()
            self.sync()
        events = profiler.key_averages()
        kernels = [event for event in events if str(event.device_type).endswith("CUDA")]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        busy_s = sum(event.self_device_time_total for event in kernels) / 1e6
        top = [(event.key[:60], event.count, round(event.self_device_time_total / 1e3, 2)) for event in kernels[:24]]
        return {"kernels": sum(event.count for event in kernels), "gpu_busy_s": round(busy_s, 4), "top_ms": top}


def versions() -> dict[str, str]:
    """Returns the versions of what the measurements depend on."""
    libraries = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("transformers", "triton", "liger_kernel", "sglang", "vllm", "trl"):
        try:
            libraries[name] = __import__(name).__version__
        except Exception as error:  # noqa: BLE001  a broken library is told, not used
            libraries[name] = f"no ({type(error).__name__})"
    return libraries
