"""The in-process engine gives each request the reply of its prompt, sampling and weights, bit for bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import psutil
import pytest
import torch
import torch._inductor.config  # before the tests hide the compiler

from agentgym.engines.local import engine as local_engine
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.local.sampling import penalize
from agentgym.engines.protocol import Completion, Engine, Sampling
from agentgym.errors import ConfigError, EngineError
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import published_views
from agentgym.model.packed_layout import PackedLayout
from agentgym.testing.contracts.engine import check_engine

HEADS = {"G=1": (2, 2), "G=2": (4, 2), "G=3": (3, 1), "G=4": (8, 2)}
Prompt = tuple[tuple[int, ...], Sampling]


def decoder(num_heads: int = 4, num_kv_heads: int = 2, *, ffn_width: int = 432, seed: int = 0) -> Decoder:
    shape = {"vocab_size": 100, "width": 64, "num_layers": 2, "head_width": 16, "context_window": 384}
    config = DecoderConfig(
        family="qwen3", num_heads=num_heads, num_kv_heads=num_kv_heads, ffn_width=ffn_width, qk_norm=True, **shape
    )
    model = Decoder(config).initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim == 2 else parameter.normal_(1.0, 0.1, generator=generator)
    return model


def logprobs_of(model: Decoder, prompt: Sequence[int], reply: Sequence[int], sampling: Sampling) -> list[float]:
    ids = torch.tensor([*prompt, *reply])
    with torch.no_grad():
        logits = model.logits(model.hidden_states(ids, PackedLayout([len(ids)])))
    logp = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)[len(prompt) - 1 : -1]
    return [float(value) for value in logp.gather(1, torch.tensor(reply)[:, None])[:, 0]]


def requests(count: int, rng: random.Random) -> list[Prompt]:
    """Prompts of 1 to 200 ids; half begin alike, some are equal; mixed sampling."""
    common = [rng.randrange(100) for _ in range(130)]
    prompts: list[Prompt] = []
    for seed in range(count):
        own = [rng.randrange(100) for _ in range(rng.choice((1, 3, 30, 70)))]
        prompt = tuple(common[: rng.choice((40, 128, 130))] + own) if seed % 2 else tuple(own)
        if seed % 5 == 4:
            prompt = prompts[-1][0]
        sampling = Sampling(max_tokens=rng.choice((1, 5, 24)), seed=seed, stop_ids=(3, 7) if seed % 3 else ())
        if seed % 7 == 0:
            sampling = replace(sampling, top_k=9, top_p=0.8, temperature=0.7)
        prompts.append((prompt, sampling))
    return prompts


async def replies(engine: LocalEngine, prompts: Sequence[Prompt], tag: str) -> list[Completion]:
    tasks = [engine.generate(prompt, sampling, session=f"{tag}{i}") for i, (prompt, sampling) in enumerate(prompts)]
    return list(await asyncio.gather(*tasks))


@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "compiled"),
    [
        *((heads, False) for heads in ("G=2", "G=4")),
        *(pytest.param(heads, False, marks=pytest.mark.slow) for heads in ("G=1", "G=3")),
        *(pytest.param(heads, True, marks=pytest.mark.slow) for heads in ("G=2", "G=3")),
    ],
    indirect=["compiled"],
)
def test_a_reply_has_the_same_bits_in_any_batch_with_or_without_prefix_sharing(heads: str, compiled: bool) -> None:
    model = decoder(*HEADS[heads])
    rng = random.Random(0)
    prompts = requests(64, rng)
    order = rng.sample(range(64), 64)

    async def play() -> None:
        engine = LocalEngine(model, LocalEngineConfig(num_slots=64))
        alone = []
        for prompt, sampling in prompts:
            alone.append(await engine.generate(prompt, sampling, session="alone"))
            await engine.update_weights({}, 0)  # nothing cached: no prefix is shared
        assert await replies(engine, prompts, "together") == alone
        await engine.update_weights({}, 0)
        shuffled = await replies(engine, [prompts[index] for index in order], "shuffled")
        assert shuffled == [alone[index] for index in order]
        await engine.close()
        tight = LocalEngineConfig(num_slots=3, max_step_tokens=64, keep_idle_s=0.0)
        few = LocalEngine(model, tight)
        assert await replies(few, prompts, "few slots") == alone
        await few.close()

    asyncio.run(play())


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], indirect=True)
def test_turns_of_an_episode_reuse_their_prefix_without_changing_a_bit(compiled: bool) -> None:
    async def episode(engine: LocalEngine, number: int, *, forget: bool = False) -> list[Completion]:
        rng = random.Random(number // 4)
        ids = [rng.randrange(100) for _ in range(60)]
        turns = []
        for turn in range(6):
            sampling = Sampling(max_tokens=rng.choice((3, 12)), seed=100 * number + turn, stop_ids=(5,))
            turns.append(await engine.generate(ids, sampling, session=f"episode {number}"))
            ids += [*turns[-1].ids, *(rng.randrange(100) for _ in range(9))]
            if forget:
                await engine.update_weights({}, 0)
        await engine.abort(f"episode {number}")
        return turns

    async def play() -> None:
        engine = LocalEngine(decoder(), LocalEngineConfig())
        alone = [await episode(engine, number, forget=True) for number in range(16)]
        assert await asyncio.gather(*(episode(engine, number) for number in range(16))) == alone
        await engine.close()
        crowded = LocalEngine(decoder(), LocalEngineConfig(num_slots=5, keep_idle_s=0.0))
        assert await asyncio.gather(*(episode(crowded, number) for number in range(16))) == alone
        await crowded.close()

    asyncio.run(play())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_engine_keeps_every_promise_of_the_protocol(family: str) -> None:
    yarn = (("factor", 4.0), ("original_max_position_embeddings", 80), ("rope_type", "yarn"))
    qwen3 = family == "qwen3"
    config = replace(decoder().config, family=family, qk_norm=qwen3, tied=qwen3, rope_scaling=() if qwen3 else yarn)
    model = Decoder(config).initialize(1)

    async def play() -> None:
        engine = LocalEngine(model)
        assert isinstance(engine, Engine)
        findings = await check_engine(engine, weights={}, recompute=lambda *args: logprobs_of(model, *args))
        assert findings == []
        await engine.close()

    asyncio.run(play())


def test_a_group_reads_its_common_prompt_once() -> None:
    async def play() -> tuple[int, int]:
        engine = LocalEngine(decoder(), LocalEngineConfig(max_step_tokens=64))
        prompt = tuple(index % 100 for index in range(300))
        prompts = [(prompt, Sampling(max_tokens=1, seed=seed)) for seed in range(8)]
        await replies(engine, prompts[:1], "one")
        num_alone = engine.num_steps
        await engine.update_weights({}, 1)
        await replies(engine, prompts, "group")
        await engine.close()
        return num_alone, engine.num_steps - num_alone

    alone, group = asyncio.run(play())
    assert alone == 5
    assert group == alone + 1


def test_a_reply_in_flight_continues_under_new_weights_and_records_both_versions() -> None:
    model = decoder()
    prompt, sampling = tuple(range(50)), Sampling(max_tokens=200, seed=3)

    async def play() -> Completion:
        engine = LocalEngine(model, version=4)
        task = asyncio.create_task(engine.generate(prompt, sampling, session="a"))
        while engine.num_steps < 20:
            await asyncio.sleep(0.001)
        await engine.pause()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        await engine.update_weights({}, 5)
        await engine.resume()
        reply = await task
        await engine.close()
        return reply

    reply = asyncio.run(play())
    assert set(reply.policy_versions) == {4, 5}
    first = reply.policy_versions.index(5)
    want = logprobs_of(model, prompt, reply.ids, sampling)
    assert reply.logprobs[first:] == pytest.approx(want[first:], abs=1e-4)
    assert reply.logprobs[:first] != pytest.approx(want[:first], abs=1e-4)


@pytest.mark.parametrize(
    ("smallest", "is_in_flight", "is_freed"), [(0, False, True), (0, True, False), (1 << 30, False, False)]
)
def test_a_pause_without_requests_frees_the_keys_of_a_large_model(
    smallest: int, is_in_flight: bool, is_freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "_SMALL_MODEL", smallest)
    prompt, sampling = tuple(range(50)), Sampling(max_tokens=40, seed=3)

    async def play() -> None:
        engine = LocalEngine(decoder())
        first = await engine.generate(prompt, sampling, session="a")
        again = asyncio.create_task(engine.generate(prompt, sampling, session="b"))
        while engine.num_steps < 50 or not (is_in_flight or again.done()):
            await asyncio.sleep(0.001)
        await engine.pause()
        keys = [kv for worker in engine._workers for kv in worker.cache.kv]
        assert any(kv.any() for kv in keys) != is_freed
        await engine.resume()
        for reply in (await again, await engine.generate(prompt, sampling, session="a")):
            assert (reply.ids, reply.logprobs) == (first.ids, first.logprobs)
        await engine.close()

    asyncio.run(play())


def test_keys_of_older_weights_never_serve_a_new_version() -> None:
    model = decoder()
    prompt, sampling = tuple(range(80)), Sampling(max_tokens=12, seed=1)

    async def play(model: Decoder, *, warm: bool) -> Completion:
        engine = LocalEngine(model)
        if warm:
            await engine.generate(prompt, sampling, session="a")
        with torch.no_grad():
            model.layers[0].qkv.mul_(1.5)
        await engine.update_weights({}, 1)
        reply = await engine.generate(prompt, sampling, session="a")
        await engine.close()
        return reply

    assert asyncio.run(play(model, warm=True)) == asyncio.run(play(decoder(), warm=False))


def test_weights_that_changed_without_an_update_are_refused() -> None:
    async def play() -> None:
        model = decoder()
        engine = LocalEngine(model)
        with torch.no_grad():
            model.layers[0].qkv.mul_(1.5)
        with pytest.raises(EngineError, match="without update_weights"):
            await engine.generate([1, 2], Sampling(max_tokens=2), session="a")
        await engine.update_weights({}, 1)
        reply = await engine.generate([1, 2], Sampling(max_tokens=2), session="a")
        assert reply.policy_versions == (1, 1)
        with pytest.raises(EngineError, match="never fall"):
            await engine.update_weights({}, 0)
        await engine.close()

    asyncio.run(play())


def test_a_failed_step_fails_every_request_in_flight_and_the_engine_continues() -> None:
    async def play() -> None:
        model = decoder()
        engine = LocalEngine(model)
        with torch.no_grad():
            model.embed[5] = float("nan")
        await engine.update_weights({}, 1)
        tasks = (engine.generate([5, 1], Sampling(max_tokens=2), session=name) for name in "ab")
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, EngineError) and "not finite" in str(error) for error in errors)
        assert all(isinstance(error, EngineError) and error.__cause__ is not None for error in errors)
        with torch.no_grad():
            model.embed[5] = 0.0
        await engine.update_weights({}, 2)
        assert len((await engine.generate([5, 1], Sampling(max_tokens=2), session="a")).ids) == 2
        await engine.close()

    asyncio.run(play())


def test_abort_keeps_what_was_sampled_and_close_fails_what_is_in_flight() -> None:
    async def play() -> None:
        engine = LocalEngine(decoder(), LocalEngineConfig(num_slots=1))
        long = Sampling(max_tokens=300)
        first = asyncio.create_task(engine.generate([1, 2, 3], long, session="first"))
        waiting = asyncio.create_task(engine.generate([1, 2, 3], long, session="waiting"))
        while engine.num_steps < 5:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineError, match="in flight"):
            await engine.generate([1], long, session="first")
        await engine.abort("first")
        reply = await first
        assert reply.finish_reason == "abort"
        assert 0 < len(reply.ids) < 300
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await waiting
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1], long, session="late")
        await engine.close()
        await engine.pause()

    asyncio.run(play())


def test_a_cancelled_request_leaves_its_slot_to_others() -> None:
    async def play() -> None:
        engine = LocalEngine(decoder(), LocalEngineConfig(num_slots=1, keep_idle_s=0.0))
        task = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=380), session="a"))
        while engine.num_steps < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await engine.generate([1, 2], Sampling(max_tokens=4), session="b")).ids) == 4
        await engine.close()

    asyncio.run(play())


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_slots"):
        LocalEngineConfig(num_slots=0)
    with pytest.raises(ConfigError, match="context window 384"):
        LocalEngine(decoder(), LocalEngineConfig(window=385))


def large_decoder() -> Decoder:
    """A hundred megabytes of weights."""
    shape = {"vocab_size": 100_000, "width": 256, "num_layers": 1, "head_width": 64, "context_window": 1024}
    config = DecoderConfig(family="qwen3", num_heads=8, num_kv_heads=8, ffn_width=64, qk_norm=True, tied=True, **shape)
    return Decoder(config).initialize(0)


@pytest.mark.long
def test_memory_that_is_given_up_is_the_systems_until_new_weights_come() -> None:
    """What the engine then samples is, bit for bit, what it sampled before."""
    prompt, sampling = list(range(1000)), Sampling(max_tokens=4, seed=1)

    def resident() -> int:
        return int(psutil.Process().memory_info().rss)

    async def run() -> None:
        model = large_decoder()
        buffer = bytearray(model.embed.detach().numpy().tobytes())  # a storage that cannot be resized, as of a file
        model.embed.data = torch.frombuffer(buffer, dtype=torch.float32).view(-1, 256)
        del buffer
        engine = LocalEngine(model, LocalEngineConfig(num_slots=8))
        weights = {name: view.detach().clone() for name, view in published_views(model)}
        prompts = [[number, *prompt] for number in range(8)]
        before = [await engine.generate(prompt, sampling, session=f"{prompt[0]}") for prompt in prompts]
        full, num_kv_bytes = resident(), 8 * 1001 * 2 * 8 * 64 * 4
        await engine.pause()
        assert full - resident() > 0.9 * num_kv_bytes
        await engine.release_memory()
        assert full - resident() > 0.9 * (100_000 * 256 * 4 + num_kv_bytes)
        await engine.resume()
        with pytest.raises(EngineError, match="the weights changed under version 0 without update_weights"):
            await engine.generate(prompt, sampling, session="early")
        await engine.update_weights(weights, 1)
        after = [await engine.generate(prompt, sampling, session=f"{prompt[0]}") for prompt in prompts[:3]]
        assert [(completion.ids, completion.logprobs) for completion in after] == [
            (completion.ids, completion.logprobs) for completion in before[:3]
        ]
        await engine.close()

    asyncio.run(run())


def test_penalties_follow_what_came_before_and_leave_other_requests_alone() -> None:
    model, prompt = decoder(), tuple(range(5, 25))
    greedy = Sampling(max_tokens=24, temperature=0.0)
    penalized = replace(greedy, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25)

    async def play() -> list[Completion]:
        engine = LocalEngine(model, LocalEngineConfig(num_slots=4, window=64))
        samplings = {"a": greedy, "b": penalized, "c": greedy}
        completions = await asyncio.gather(
            *(engine.generate(prompt, sampling, session=name) for name, sampling in samplings.items())
        )
        await engine.close()
        return list(completions)

    plain, changed, last = asyncio.run(play())
    assert plain.ids == last.ids != changed.ids and plain.logprobs == last.logprobs
    reply_ids: list[int] = []
    for id_, logprob in zip(changed.ids, changed.logprobs, strict=True):
        ids = torch.tensor([*prompt, *reply_ids])
        with torch.no_grad():
            logits_V = model.logits(model.hidden_states(ids, PackedLayout([len(ids)])))[-1].clone()
        penalize(logits_V, ids.numpy(), len(prompt), penalized)
        assert id_ == int(logits_V.argmax())
        assert logprob == pytest.approx(float(logits_V.log_softmax(-1)[id_]), abs=1e-4)
        reply_ids.append(id_)
