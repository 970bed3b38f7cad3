"""Measures this machine with randomly initialized models: decoding, prefill, and training steps."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import torch

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.machine_memory import total_memory
from agentgym.engines.protocol import Sampling
from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.learner.token_logprobs import score_targets
from agentgym.trainers.parallel.gradient_threads import GradientWorkers, MicroResult
from agentgym.trainers.planning.config import GpuSpec, MeasureSpec
from agentgym.trainers.planning.measured import Measured, Sample
from agentgym.trainers.planning.shapes import ModelShape
from agentgym.trainers.speed.gpus import gpu_named
from agentgym.trainers.speed.peak import peak_flops

__all__ = ["measure"]

STEPS = 24
"""The number of tokens over which decoding is timed."""
REPEATS = 3
COPIED = 2**26
"""The length of the float32 tensor that is copied to measure the memory's bandwidth."""


def measure(
    shape: ModelShape, spec: MeasureSpec | None = None, *, tell: Callable[[str], None] = lambda text: None
) -> Measured:
    """Measures this machine with two models, of `shape` and of half its width.

    Only models of different widths separate a layer's fixed cost from the cost of its operations. `tell` is called
    with a line on each measurement. The models must fit on the device, with their gradients and without an optimizer.
    """
    spec = spec or MeasureSpec()
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if spec.device == "auto" else spec.device)
    kind = ("float32" if place.type == "cpu" else "bfloat16") if spec.dtype == "auto" else spec.dtype
    threads = min(8, len(os.sched_getaffinity(0))) if place.type == "cpu" else 1
    gpu = _device(place, getattr(torch, kind), threads)
    samples: list[Sample] = []
    for variant in (_half_width(shape), shape):
        model = Decoder(_config(variant, spec.context + 2 * STEPS)).to(place, getattr(torch, kind))
        model.initialize(0) if place.type == "cpu" else _fill(model)
        samples += asyncio.run(_engines(model, variant, spec, tell))
        for rows, length, parts in ((2, spec.context, 1), (8, spec.context // 2, 1), (2, spec.context, 4)):
            tell(f"{variant.name}: {parts} micro-batches of {rows} rows")
            samples.append(_train(model, variant, rows, length, parts * threads, threads))
    return Measured(gpu=gpu, samples=tuple(samples))


def _half_width(shape: ModelShape) -> ModelShape:
    """Returns a shape of about half the width."""
    return replace(
        shape,
        name=f"half of {shape.name}",
        width=shape.width // 2,
        num_heads=max(1, shape.num_heads // 2),
        num_kv_heads=max(1, shape.num_kv_heads // 2),
        ffn_width=shape.ffn_width // 2,
    )


def _config(shape: ModelShape, window: int) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama",
        vocab_size=shape.vocab_size,
        width=shape.width,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_width=shape.head_width,
        ffn_width=shape.ffn_width,
        context_window=window,
        tied=shape.tied,
        qk_norm=shape.qk_norm,
        qkv_bias=shape.qkv_bias,
    )


@torch.no_grad()
def _fill(model: Decoder) -> None:
    """Draws weights of the usual size on the model's device: a CPU takes minutes for billions."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, 0.02)


def _device(place: torch.device, dtype: torch.dtype, threads: int) -> GpuSpec:
    """Returns the device's peaks: the vendor's for a known GPU, else with the bandwidth of a copy."""
    flops = peak_flops(place, dtype, threads)
    if flops is None:
        raise ConfigError(f"the peak of {place} is not known: give --measured a file that has its gpu.tflops")
    if place.type == "cpu":
        gib, name = total_memory() / 2**30, f"CPU, {threads} cores"
    else:
        gib, name = torch.cuda.get_device_properties(place).total_memory / 2**30, torch.cuda.get_device_name(place)
    known = gpu_named(name)
    bandwidth = known.memory_gb_s if known else _bandwidth(place) / 1e9
    link = known.link_gb_s if known else bandwidth / 2
    return GpuSpec(
        name=name,
        memory_gib=round(gib, 1),
        tflops=round(flops / 1e12, 4),
        memory_gb_s=round(bandwidth, 2),
        link_gb_s=round(link, 2),
    )


def _bandwidth(place: torch.device) -> float:
    """Returns the bytes per second that a copy reads and writes."""
    source = torch.ones(COPIED, device=place)
    target = torch.empty_like(source)
    return 2 * 4 * COPIED / min(_seconds(lambda: target.copy_(source), place) for _ in range(REPEATS))


def _seconds(work: Callable[[], object], place: torch.device) -> float:
    _wait_for(place)
    started = time.perf_counter()
    work()
    _wait_for(place)
    return time.perf_counter() - started


def _wait_for(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


async def _engines(model: Decoder, shape: ModelShape, spec: MeasureSpec, tell: Callable[[str], None]) -> list[Sample]:
    """Times the prefill of prompts and then decoding, for each batch size."""
    most = max(spec.batches)
    engine = LocalEngine(model, LocalEngineConfig(num_slots=most, max_step_tokens=max(512, most), compile=spec.compile))
    try:
        tell(f"{shape.name}: the engine begins")
        await engine.prepare()
        samples = []
        for batch in spec.batches:
            tell(f"{shape.name}: {batch} requests")
            samples += await _batch(engine, shape, batch, spec.context)
        return samples
    finally:
        await engine.close()


async def _batch(engine: LocalEngine, shape: ModelShape, batch: int, context: int) -> list[Sample]:
    """Times one batch size, with prompts that share no prefix, so that requests share nothing."""
    random = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, shape.vocab_size, (REPEATS, batch, context), generator=random).tolist()
    read, decoded = [], []
    for number, of_round in enumerate(prompts):
        names = [f"{batch}/{number}/{row}" for row in range(batch)]
        read.append(await _together(engine, of_round, names, 1))
        decoded.append(await _together(engine, of_round, names, STEPS) / STEPS)
    size, longer = engine.model.embed.element_size(), context + STEPS // 2
    return [
        Sample(what="prefill", model=shape, rows=batch, context=context, seconds=median(read), bytes=size),
        Sample(what="decode", model=shape, rows=batch, context=longer, seconds=median(decoded), bytes=size),
    ]


async def _together(engine: LocalEngine, prompts: list[list[int]], names: list[str], tokens: int) -> float:
    """Returns the seconds until all prompts have their replies."""
    started = time.perf_counter()
    sampling = Sampling(max_tokens=tokens, seed=1)
    await asyncio.gather(
        *(engine.generate(prompt, sampling, session=name) for prompt, name in zip(prompts, names, strict=True))
    )
    return time.perf_counter() - started


def _train(model: Decoder, shape: ModelShape, rows: int, length: int, parts: int, threads: int) -> Sample:
    """Times forward and backward passes over `parts` micro-batches of rows, on the threads of a learner."""
    place = model.embed.device
    random = torch.Generator().manual_seed(rows)
    batches = [torch.randint(0, shape.vocab_size, (rows * length,), generator=random).to(place) for _ in range(parts)]
    parameters = list(model.parameters())
    layout = PackedLayout([length] * rows, place)

    def loss(ids_N: torch.Tensor) -> MicroResult[None]:
        return MicroResult(
            -score_targets(model.hidden_states(ids_N, layout), model.head_weight, ids_N).logp_N.mean(), None
        )

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        workers.accumulate(batches, loss, parameters)

    workers = GradientWorkers(threads)
    try:
        seconds = list(_time_repeats(step, place))
    finally:
        workers.close()
    return Sample(
        what="train",
        model=shape,
        rows=rows * parts,
        context=length,
        seconds=median(seconds),
        bytes=model.embed.element_size(),
        parts=parts / threads,
    )


def _time_repeats(work: Callable[[], object], place: torch.device) -> Iterator[float]:
    """Yields the seconds of each repeat, after a warm-up."""
    work()
    for _ in range(REPEATS):
        yield _seconds(work, place)
