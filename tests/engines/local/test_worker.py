"""The workers of a small model's engine give the replies of one, share what they sample from, and fail alone."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence

import pytest
import torch

from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.worker import EngineWorker
from agentgym.engines.protocol import Completion, Sampling
from agentgym.errors import EngineError
from agentgym.model.decoder import Decoder, DecoderConfig


def decoder() -> Decoder:
    shape = {"vocab_size": 100, "width": 64, "num_layers": 2, "head_width": 16, "ffn_width": 96}
    return Decoder(DecoderConfig(family="qwen3", num_heads=4, num_kv_heads=2, context_window=256, **shape)).initialize(
        0
    )


PROMPTS = [[n % 40, *range(n % 40 + 1)] for n in range(100)]
"""Forty prompts, of one to forty tokens more than one."""


async def replies(engine: LocalEngine) -> list[Completion]:
    requests = (
        engine.generate(prompt, Sampling(max_tokens=9, seed=n), session=str(n)) for n, prompt in enumerate(PROMPTS)
    )
    return list(await asyncio.gather(*requests))


@pytest.mark.parametrize("kind", ["uncompiled", pytest.param("compiled", marks=pytest.mark.slow)])
def test_the_number_of_workers_changes_no_reply(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "uncompiled":
        monkeypatch.delenv("CXX", raising=False)
    model = decoder()

    async def play(num_workers: int, sampled: set[int]) -> list[Completion]:
        engine = LocalEngine(model, LocalEngineConfig(threads=num_workers))
        completions = await replies(engine)
        again = await replies(engine)
        assert [completion.ids for completion in again] == [completion.ids for completion in completions]
        sampled |= {index for index, worker in enumerate(engine._workers) if worker.num_steps}
        assert engine.num_steps == sum(worker.num_steps for worker in engine._workers)
        await engine.close()
        return completions

    alone, seen = asyncio.run(play(1, set())), [set[int](), set[int]()]
    assert asyncio.run(play(2, seen[0])) == alone
    assert asyncio.run(play(3, seen[1])) == alone
    assert seen == [{0, 1}, {0, 1, 2}], "each of them sampled"
    assert not [thread for thread in threading.enumerate() if "local-engine" in thread.name]


async def at_once(engine: LocalEngine, requests: Sequence[Coroutine[None, None, Completion]]) -> list[Completion]:
    """Has all requests arrive before the first step."""
    await engine.pause()
    tasks = [asyncio.create_task(request) for request in requests]
    await asyncio.sleep(0)
    await engine.resume()
    return await asyncio.gather(*tasks)


def workers_of(engine: LocalEngine, session: str) -> list[EngineWorker]:
    return [worker for worker in engine._workers if worker.has(session)]


def test_sessions_stay_with_their_worker_groups_stay_together_and_load_is_even() -> None:
    async def play() -> None:
        engine = LocalEngine(decoder(), LocalEngineConfig(threads=2, num_slots=64))
        names = [f"{group}#{member}" for group in range(8) for member in range(8)]
        prompts = {name: [int(name[0]), *range(20)] for name in names}

        async def turn() -> None:
            requests = [engine.generate(prompts[name], Sampling(max_tokens=3, seed=1), session=name) for name in names]
            for name, reply in zip(names, await at_once(engine, requests), strict=True):
                prompts[name] += [*reply.ids, 7]

        await turn()
        assert all(len(workers_of(engine, name)) == 1 for name in names)
        homes = {name: workers_of(engine, name)[0] for name in names}
        assert sorted(Counter(homes.values()).values()) == [32, 32]
        assert all(len({homes[f"{group}#{member}"] for member in range(8)}) == 1 for group in range(8))
        steps = [worker.num_steps for worker in engine._workers]
        await turn()
        assert {name: workers_of(engine, name)[0] for name in names} == homes
        assert [worker.num_steps - n for worker, n in zip(engine._workers, steps, strict=True)] == [3, 3], (
            "no rereading"
        )
        for name in names:
            await engine.abort(name)
            assert not workers_of(engine, name)
        await engine.close()

    asyncio.run(play())


def test_a_large_group_is_divided_and_no_worker_gets_more_sessions_than_it_has_slots() -> None:
    async def play() -> None:
        engine = LocalEngine(decoder(), LocalEngineConfig(threads=2, num_slots=64, keep_idle_s=60))
        requests = [engine.generate([1, 2, 3], Sampling(max_tokens=3, seed=n), session=str(n)) for n in range(64)]
        await asyncio.wait_for(at_once(engine, requests), 30)
        assert all(16 <= worker.num_sessions <= 32 for worker in engine._workers)
        await engine.close()

    asyncio.run(play())


def test_few_slots_and_large_models_have_one_worker() -> None:
    async def play() -> None:
        counts = []
        for settings in ({"num_slots": 31}, {"num_slots": 32}, {"num_slots": 32, "threads": 1}):
            engine = LocalEngine(decoder(), LocalEngineConfig(**{"threads": 2, **settings}))
            counts.append(len(engine._workers))
            await engine.close()
        assert counts == [1, 2, 1]

    asyncio.run(play())


def test_an_update_a_pause_and_a_close_wait_for_every_worker() -> None:
    model = decoder()

    async def play() -> None:
        engine = LocalEngine(model, LocalEngineConfig(threads=2))
        long = Sampling(max_tokens=200, seed=1)
        requests = [asyncio.create_task(engine.generate([n, 1], long, session=str(n))) for n in range(40)]
        while min(worker.num_steps for worker in engine._workers) < 5:
            await asyncio.sleep(0.001)
        await engine.pause()
        before = engine.num_steps
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        await asyncio.sleep(0.05)
        assert engine.num_steps == before
        await engine.update_weights({}, 1)
        await engine.resume()
        completions = await asyncio.gather(*requests)
        assert all(set(reply.policy_versions) == {0, 1} for reply in completions)
        fresh = LocalEngine(model, LocalEngineConfig(threads=1), version=1)
        for n in (0, 1, 39):  # what was sampled after the update is what the new weights give to what was before
            num_before = completions[n].policy_versions.index(1)
            rest = Sampling(max_tokens=1, temperature=0.0)
            both = [
                await target.generate([n, 1, *completions[n].ids[:num_before]], rest, session="a")
                for target in (engine, fresh)
            ]
            assert both[0] == both[1]
        waiting = [asyncio.create_task(engine.generate([n, 1], long, session=str(n))) for n in range(40)]
        await asyncio.sleep(0)
        await asyncio.gather(engine.pause(), engine.abort("3"), engine.resume(), engine.close(), fresh.close())
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, Completion | EngineError) for result in ended)
        assert sum(isinstance(result, EngineError) for result in ended) > 30

    asyncio.run(asyncio.wait_for(play(), 60))


def test_a_worker_that_fails_fails_its_own_requests_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        engine = LocalEngine(decoder(), LocalEngineConfig(threads=2))
        await replies(engine)
        broken = engine._workers[1]

        def fail(*args: object) -> None:
            raise RuntimeError("a broken part")

        monkeypatch.setattr(broken.runner, "forward", fail, raising=True)
        homes = {name: workers_of(engine, name)[0] for name in map(str, range(100))}
        requests = (engine.generate([*PROMPTS[n], 5], Sampling(max_tokens=2), session=str(n)) for n in range(100))
        ended = dict(zip(homes, await asyncio.gather(*requests, return_exceptions=True), strict=True))
        assert 0 < sum(home is broken for home in homes.values()) < 100
        for name, home in homes.items():
            assert isinstance(ended[name], EngineError if home is broken else Completion)
        monkeypatch.undo()
        assert len(await replies(engine)) == 100
        await engine.close()

    asyncio.run(play())
