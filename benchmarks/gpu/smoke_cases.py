"""Asks whether it runs at all, and right: the machine, a learner step, replies, parity, gradients against float32."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import torch
from probe_case import Probe, Workload, make_learner, make_model, on_policy, shape_of, versions

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.protocol import Completion, Sampling


def machine(probe: Probe) -> dict[str, Any]:
    """Returns the versions, and what the GPU reaches at most: products, copies, small operators."""
    report: dict[str, Any] = dict(versions())
    if probe.is_cuda:
        report |= {"gpu": torch.cuda.get_device_name(), "free_gb": round(torch.cuda.mem_get_info()[0] / 1e9, 1)}
    size = 8192 if probe.is_cuda else 512
    a, b = (torch.randn(size, size, device=probe.device, dtype=torch.bfloat16) for _ in range(2))
    product_s = probe.seconds(lambda: a @ b, 5, 3)
    source = torch.empty(1 << 30 if probe.is_cuda else 1 << 20, dtype=torch.uint8, device=probe.device)
    copy_s = probe.seconds(source.clone, 5, 2)
    small = torch.zeros(8, device=probe.device)
    small_s = probe.seconds(lambda: [small.add_(1) for _ in range(1000)])
    host_s = probe.seconds(source.cpu)
    return report | {
        "product_tflops": round(2 * size**3 / product_s / 1e12, 1),
        "copy_gb_s": round(2 * source.nbytes / copy_s / 1e9),
        "us_of_a_small_operator": round(small_s * 1e3, 2),
        "to_host_gb_s": round(source.nbytes / host_s / 1e9, 1),
    }


def step(probe: Probe) -> dict[str, Any]:
    """Takes two steps of the learner on its own logprobs."""
    model = make_model(probe.shape, probe.device)
    learner = make_learner(model, device=probe.device)
    batch = on_policy(learner, Workload("single", probe.shape).batch())
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        stats = learner.update(batch)
        probe.sync()
        seconds.append(round(time.perf_counter() - started, 3))
    return {"seconds": seconds, "loss": stats.loss, "grad_norm": stats.grad_norm, "peak_gb": probe.peak_gb()}


def parity(probe: Probe) -> dict[str, Any]:
    """Plays replies of the engine, and compares the learner's logprobs of their tokens."""
    model = make_model(probe.shape, probe.device)
    with torch.no_grad():
        model.embed.mul_(2.0)  # random weights give nearly even distributions
    num_tokens, random = 16 if probe.is_tiny else 128, np.random.default_rng(0)
    prompts = [random.integers(0, model.vocab_size, 64 + 16 * number).tolist() for number in range(8)]
    report: dict[str, Any] = {}

    async def play() -> list[Completion]:
        engine = LocalEngine(model, LocalEngineConfig(num_slots=16, window=1024, max_step_tokens=2048))
        started = time.perf_counter()
        await engine.prepare()
        report["prepare_s"] = round(time.perf_counter() - started, 2)

        async def replies(count: int, tag: str) -> list[Completion]:
            samplings = [Sampling(max_tokens=num_tokens, temperature=1.0, seed=number) for number in range(count)]
            jobs = (engine.generate(prompts[i], samplings[i], session=f"{tag}{i}") for i in range(count))
            return list(await asyncio.gather(*jobs))

        every, few = await replies(8, "a"), await replies(3, "b")
        report["same_in_other_company"] = [a.ids == b.ids for a, b in zip(every, few, strict=False)]
        await engine.close()
        return every

    replies = asyncio.run(play())
    work = Workload("long", "tiny")
    work.rows = [np.array([*prompt, *reply.ids]) for prompt, reply in zip(prompts, replies, strict=True)]
    work.trained = [np.arange(len(row) - 1) >= len(prompt) - 1 for row, prompt in zip(work.rows, prompts, strict=True)]
    sampled_M = torch.cat([torch.tensor(reply.logprobs) for reply in replies])
    logp_M = make_learner(model, device=probe.device).logprobs(work.batch(sampled_M.clamp(max=0))).float().cpu()
    gap_M = (logp_M - sampled_M).abs()
    return report | {"mean": float(gap_M.mean()), "max": float(gap_M.max()), "num_tokens": len(gap_M)}


def gradients(probe: Probe) -> dict[str, Any]:
    """Compares logprobs and gradients in bfloat16, and in float32 with TF32, with those in float32."""
    work = Workload("turns", probe.shape)
    batch = None

    def compute(dtype: torch.dtype, tf32: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        nonlocal batch
        torch.backends.cuda.matmul.allow_tf32 = tf32
        model = make_model(probe.shape, probe.device, torch.float32).to(dtype)
        learner = make_learner(
            model, device=probe.device, dtype=str(dtype).removeprefix("torch."), micro_batch_tokens=4096
        )
        batch = batch or on_policy(learner, work.batch())
        share = learner._share(batch)
        learner.ranks.accumulate(
            learner._parts(batch, share), learner._compute, learner.optimizer.parameters, share.sizes
        )
        gradients_now = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
        for parameter in model.parameters():
            parameter.grad = None
        logp_M = learner.logprobs(batch).float().cpu()
        learner.close()
        return logp_M, gradients_now

    logp_M, expected = compute(torch.float32, False)
    results: dict[str, Any] = {}
    for name, arguments in {"bfloat16": (torch.bfloat16, False), "tf32": (torch.float32, True)}.items():
        other_M, gradients_now = compute(*arguments)
        gap_M = (other_M - logp_M).abs()
        errors = {key: float((gradients_now[key] - expected[key]).norm() / expected[key].norm()) for key in expected}
        worst = max(errors, key=lambda key: errors[key])
        results[name] = {
            "logprob_mean": float(gap_M.mean()),
            "logprob_max": float(gap_M.max()),
            "gradient_worst": (worst, errors[worst]),
            "gradient_median": float(np.median(list(errors.values()))),
        }
    torch.backends.cuda.matmul.allow_tf32 = False
    return results


def main() -> None:
    """Runs the cases."""
    probe = Probe()
    probe.case("machine", lambda: machine(probe))
    probe.case("learner step", lambda: step(probe), shape=probe.shape, weights=shape_of(probe.shape).num_layers)
    probe.case("engine and learner agree", lambda: parity(probe), shape=probe.shape)
    probe.case("gradients", lambda: gradients(probe), shape=probe.shape)


if __name__ == "__main__":
    main()
