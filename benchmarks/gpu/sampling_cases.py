"""Measures the in-process engine: its steps by how they attend and are launched, and replies by concurrency."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import torch
from probe_case import Probe, make_model, shape_of

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.kernels.gpu_tiles import GpuTiles, cut_prompts
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.rows import Rows
from agentgym.engines.local.runners import make_runner
from agentgym.engines.local.sampling import draw
from agentgym.engines.local.step import StepRunner
from agentgym.engines.protocol import Sampling


def plain_runner(model: Any, cache: SlotCache) -> StepRunner:
    """Returns the step that attends by products of torch, without kernels of its own."""
    runner = StepRunner(model, cache)
    runner._attends_compiled = False
    return runner


def measure_steps(probe: Probe) -> None:
    """Measures single steps: all slots, every second, one long among short ones, prompts."""
    model = make_model(probe.shape, probe.device)
    num_slots, window = (16, 512) if probe.is_tiny else (128, 2048)
    cache = SlotCache(model, num_slots, window)
    every, half, first = np.arange(num_slots), np.arange(0, num_slots, 2), np.zeros(1, np.int64)
    mixed_N = np.full(num_slots, window // 8)
    mixed_N[-1] = window - 100
    steps = {
        f"decode 1 at {window // 2}": Rows(first, first + window // 2, 1, (), first),
        f"decode {num_slots} at {window // 2}": Rows(every, every * 0 + window // 2, num_slots, (), every),
        f"decode every second of {num_slots}": Rows(half, half * 0 + window // 2, len(half), (), np.arange(len(half))),
        f"decode {num_slots} at {window // 8}, one at {window - 100}": Rows(every, mixed_N, num_slots, (), every),
    }
    for length in (128,) if probe.is_tiny else (512, 1024):
        at_N = np.arange(length)
        steps[f"prompt of {length}"] = Rows(at_N * 0, at_N, 0, ((0, 0, length),), at_N[-1:])
        steps[f"prompt of {length} after {window // 2 - 1}"] = Rows(
            at_N * 0, at_N + window // 2 - 1, 0, ((0, window // 2 - 1, length),), at_N[-1:]
        )
    runners = {
        "as it comes": make_runner(model, cache),
        "kernels": StepRunner(model, cache),
        "plain": plain_runner(model, cache),
    }
    first_logps: dict[str, torch.Tensor] = {}
    for side, runner in runners.items():
        generator = torch.Generator(device=probe.device).manual_seed(0)
        for kv in cache.kv:
            kv.normal_(generator=generator)
        for name, rows in steps.items():

            def step(name: str = name, rows: Rows = rows, runner: Any = runner, side: str = side) -> dict[str, Any]:
                def work() -> torch.Tensor:
                    with torch.inference_mode():
                        return runner.forward(rows)

                logp_RV = work().float().log_softmax(-1).clone()
                reference = first_logps.setdefault(name, logp_RV)
                result = {
                    "ms": round(probe.seconds(work, 5, 1) * 1e3, 2),
                    "differs_by": float((logp_RV - reference).abs().max()),
                }
                return result | ({} if side == "plain" else probe.kernels(work))

            probe.case("step", step, what=name, how=side, shape=probe.shape, slots=num_slots, window=window)
    logits_RV = torch.randn(num_slots, model.vocab_size, device=probe.device, dtype=torch.bfloat16)
    ones = np.ones(num_slots, np.float32)

    def sample() -> dict[str, Any]:
        def work() -> object:
            return draw(logits_RV, ones / 2, ones, np.zeros(num_slots, np.int64), ones, 0 * ones)[0].cpu()

        return {"ms": round(probe.seconds(work, 5) * 1e3, 2)} | probe.kernels(work)

    probe.case("draw", sample, rows=num_slots, shape=probe.shape)


def attend_prompt(probe: Probe, length: int, at: int) -> dict[str, Any]:
    """Measures the attention of one layer to a prompt after others, beside torch's flash kernel, on a GPU."""
    from agentgym.engines.local.kernels.gpu_attention import attend_stored

    config, end = shape_of(probe.shape), at + length
    group, width = config.num_heads // config.num_kv_heads, config.head_width
    numbers = {"device": probe.device, "dtype": torch.bfloat16}
    kv = torch.randn(2, 1, config.num_kv_heads, end, width, **numbers)
    q_NHD = torch.randn(length, config.num_heads, width, **numbers) * width**-0.5
    cut = torch.from_numpy(cut_prompts(0, [length], group)).to(probe.device)
    slot_N, position_N = (torch.arange(length, device=probe.device) * step for step in (0, 1))
    tiles = GpuTiles(slot_N, position_N + at, 0, cut[0], cut[1], slot_N[:1])
    out_NHD = torch.empty_like(q_NHD)
    ours_s = probe.seconds(lambda: attend_stored(q_NHD, kv, tiles, out_NHD), 20, 3)
    k_NKD, v_NKD = (part[0].transpose(0, 1)[None] for part in kv)
    sizes = (None, None, length, end, 0.0, True, False)
    flash = torch.ops.aten._flash_attention_forward
    flash_s = probe.seconds(lambda: flash(q_NHD[None], k_NKD, v_NKD, *sizes, scale=1.0), 20, 3)
    reference_NHD = flash(q_NHD[None], k_NKD, v_NKD, *sizes, scale=1.0)[0][0]
    flops = 4 * config.num_heads * width * (length * at + length * (length + 1) / 2)
    return {
        "ms": round(ours_s * 1e3, 4),
        "flash_ms": round(flash_s * 1e3, 4),
        "tflops": round(flops / ours_s / 1e12),
        "differs_by": float((out_NHD - reference_NHD).float().norm() / reference_NHD.float().norm()),
    }


def measure_replies(probe: Probe) -> None:
    """Measures whole replies, and prompts with a reply of one token."""
    model = make_model(probe.shape, probe.device)
    num_slots, window, reply = (16, 512, 16) if probe.is_tiny else (128, 2048, 256)
    random = np.random.default_rng(0)

    async def play(engine: LocalEngine, count: int, prompt: int, num_tokens: int) -> dict[str, Any]:
        prompts = [random.integers(0, model.vocab_size, prompt).tolist() for _ in range(count)]
        before, started = engine.num_steps, time.perf_counter()
        await asyncio.gather(
            *(
                engine.generate(ids, Sampling(max_tokens=num_tokens, temperature=1.0, seed=i), session=f"{started}-{i}")
                for i, ids in enumerate(prompts)
            )
        )
        seconds, steps = time.perf_counter() - started, engine.num_steps - before
        return {
            "sampled_per_s": round(count * num_tokens / seconds),
            "prompt_tokens_per_s": round(count * prompt / seconds),
            "ms_per_step": round(seconds / steps * 1e3, 2),
            "steps": steps,
        }

    async def measure(slots: int, longest: int, jobs: list[tuple[int, int, int]]) -> None:
        engine = LocalEngine(model, LocalEngineConfig(num_slots=slots, window=longest, max_step_tokens=2048))
        await engine.prepare()
        await play(engine, slots, 32, 4)
        await play(engine, 1, longest - 1, 1)
        for count, prompt, num_tokens in jobs:
            if probe.has_time:
                result = await play(engine, count, prompt, num_tokens)
                about = {"concurrency": count, "prompt": prompt, "reply": num_tokens, "shape": probe.shape}
                probe.case("replies", lambda result=result: result, **about)
        await engine.close()

    jobs = [(count, 32, reply) for count in (1, 8, num_slots // 2, num_slots)]
    asyncio.run(measure(num_slots, window, [*jobs, (1, window // 2, 1), (8, window // 2, 1)]))
    asyncio.run(measure(2, 8 * window, [(1, 8 * window - 1, 1)]))


def main() -> None:
    """Runs the cases."""
    probe = Probe()
    probe.case("replies of an engine", lambda: measure_replies(probe) or {}, shape=probe.shape)
    for length, at in ((1024, 0), (1024, 1023), (2048, 0), (2048, 14_336)) if probe.is_cuda else ():
        about = {"length": length, "at": at, "shape": probe.shape}
        probe.case("attention of a prompt", lambda length=length, at=at: attend_prompt(probe, length, at), **about)
    probe.case("single steps", lambda: measure_steps(probe) or {}, shape=probe.shape)


if __name__ == "__main__":
    main()
