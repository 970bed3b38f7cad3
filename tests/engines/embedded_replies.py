"""What is asked of an engine in its own process, whichever it is; imported by the scripts beside it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.servers.replicated import ReplicatedEngine

rng = random.Random(0)
PROMPT = [rng.randrange(1984) for _ in range(200)]
LONG = 2.0
"""The temperature of long replies; at lower ones they are one id over and over."""
PROBE = Sampling(max_tokens=20)


async def replies(engine: ReplicatedEngine, folders: Sequence[Path]) -> list[object]:
    """Replies of each model at several temperatures, as `[version, temperature, ids, logprobs, versions, checksum]`."""
    rows: list[object] = []
    for version, folder in enumerate(folders):
        report = await engine.update_weights(load_file(folder / "model.safetensors"), version)
        for temperature in (0.6, 1.0, 1.3):
            sampling = Sampling(max_tokens=20, temperature=temperature, seed=version)
            reply = await engine.generate(PROMPT, sampling, session="a")
            rows.append([version, temperature, reply.ids, reply.logprobs, reply.policy_versions, report.checksum])
    return rows


async def long_reply(engine: ReplicatedEngine) -> asyncio.Task[Completion]:
    """A reply of 700 ids, some of which are sampled."""
    task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=700, temperature=LONG), session="long"))
    await engine.generate(PROMPT, PROBE, session="probe")
    assert not task.done()
    return task


async def met_by_an_update(engine: ReplicatedEngine, folder: Path, version: int) -> Completion:
    """A reply that the update to that model met, aborted some ids later."""
    task = await long_reply(engine)
    await engine.pause()
    await engine.update_weights(load_file(folder / "model.safetensors"), version)
    await engine.resume()
    await engine.generate(PROMPT, PROBE, session="probe")
    await engine.abort("long")
    return await task
