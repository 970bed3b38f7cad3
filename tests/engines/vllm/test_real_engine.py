"""A real vLLM server of the embedded model samples what the trainer computes, whatever is updated and when."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import pytest
import safetensors.torch
import torch

from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Completion, Engine, Sampling
from agentgym.engines.servers.replicated import Replica, ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig, ServerLaunch
from agentgym.engines.servers.server_process import ServerProcess
from agentgym.engines.servers.serving_settings import EngineServing, PauseMode, ServingSettings
from agentgym.engines.vllm.api import read_vllm_completion, sampling_params
from agentgym.engines.vllm.engine import open_vllm, vllm_engine
from agentgym.engines.vllm.replica import VllmReplica
from agentgym.engines.vllm.server import VllmServer
from agentgym.engines.weights.buckets import fused_digests, overall_digest, safetensors_bytes
from agentgym.errors import EngineError
from agentgym.model.model_folder import save_model_folder
from agentgym.testing.contracts.engine import check_engine

pytestmark = pytest.mark.engine
TOLERANCE = 1e-4
ROUNDING = 1e-3
"""Over thousands of ids some are unlikely, and their logits large."""
WRONG = 1e-2
"""Far more than rounding: a policy that is not the one it is thought to be."""
MakeReference = Callable[..., Any]
Played = Callable[..., None]
Closable = TypeVar("Closable", ReplicatedEngine, VllmServer)
MODES: tuple[PauseMode, ...] = ("abort", "in_place", "retract")


def gap(model: Any, prompt: Sequence[int], reply: Completion, sampling: Sampling, start: int = 0) -> float:
    """The largest difference between the engine's logprobs from id `start` on and the trainer's."""
    return float(max(model.gaps(prompt, reply.ids, reply.logprobs, sampling.temperature)[start:]))


@asynccontextmanager
async def closing(what: Closable) -> AsyncIterator[Closable]:
    """Closes it, whatever happens."""
    try:
        yield what
    finally:
        await what.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1984) for _ in range(length)]


@pytest.fixture
def played(vllm_server: ServerProcess) -> Played:
    """`played(play, **settings)`: plays with an engine on the running server, at version 0 of the shipped model."""

    async def run(play: Callable[[ReplicatedEngine], Awaitable[None]], settings: ServingSettings) -> None:
        config = ServerConfig(urls=(vllm_server.url,), serving=settings)
        async with closing(await open_vllm(config, None)) as engine:
            await play(engine)

    return lambda play, **settings: asyncio.run(run(play, EngineServing(**settings)))


@pytest.mark.parametrize("mode", MODES)
def test_the_engine_keeps_every_promise_of_the_protocol(
    played: Played, reference: MakeReference, mode: PauseMode
) -> None:
    model = reference(0)

    async def play(engine: ReplicatedEngine) -> None:
        assert isinstance(engine, Engine)
        findings = await check_engine(
            engine,
            weights=model.tensors(),
            recompute=lambda prompt, reply, sampling: model.logprobs(prompt, reply, sampling.temperature),
        )
        assert [finding for finding in findings if finding.severity == "error"] == []
        assert {finding.message for finding in findings} <= {
            "logprobs change in their last bits with what else is in flight"
        }

    played(play, pause=mode)


@pytest.mark.parametrize("path", ["memory", "disk", "broadcast"])
def test_logprobs_are_the_trainers_at_every_temperature_before_and_after_updates(
    vllm_server: ServerProcess, reference: MakeReference, path: Any
) -> None:
    prompt = prompt_of(300)

    async def run() -> None:
        config = ServerConfig(urls=(vllm_server.url,), serving=EngineServing(sync=path, bucket_mb=1))
        async with closing(await open_vllm(config, None)) as engine:
            for version in range(3):
                model = reference(version)
                report = await engine.update_weights(model.tensors(), version)
                assert (report.version, report.num_tensors, report.num_bytes) == (version, 46, 4_167_168)
                assert report.checksum == overall_digest(fused_digests(model.tensors()))
                for temperature in (0.6, 1.0, 1.3):
                    sampling = Sampling(max_tokens=40, temperature=temperature, seed=version)
                    reply = await engine.generate(prompt, sampling, session="a")
                    assert gap(model, prompt, reply, sampling) < TOLERANCE
                    assert set(reply.policy_versions) == {version}

    asyncio.run(run())


def test_seeds_are_honoured_and_filtered_sampling_reports_its_own_distribution(
    played: Played, reference: MakeReference
) -> None:
    prompt = prompt_of(150)
    model = reference(0)
    sampling = Sampling(max_tokens=30, top_k=1, seed=5)

    async def play(engine: ReplicatedEngine) -> None:
        free = [
            (await engine.generate(prompt, Sampling(max_tokens=30, seed=seed), session="a")).ids for seed in (1, 2, 1)
        ]
        assert free[0] == free[2] != free[1]
        reply = await engine.generate(prompt, sampling, session="a")
        assert reply.logprobs == pytest.approx([0.0] * 30, abs=1e-6)
        greedy = replace(sampling, temperature=0.0, top_k=0)
        assert (await engine.generate(prompt, greedy, session="a")).ids == reply.ids
        top = replace(sampling, top_k=20, temperature=0.7)
        reply = await engine.generate(prompt, top, session="a")
        logits = model.logits(prompt, reply.ids) / 0.7
        top_logits = logits.topk(20).values
        chosen = logits.gather(1, torch.tensor(reply.ids)[:, None])[:, 0]
        assert reply.logprobs == pytest.approx((chosen - top_logits.logsumexp(1)).tolist(), abs=TOLERANCE)
        penalized = replace(greedy, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25)
        reply = await engine.generate(prompt, penalized, session="a")
        logp = model.penalized(prompt, reply.ids, penalized).log_softmax(-1).max(-1)
        assert reply.ids == tuple(logp.indices.tolist())
        assert reply.logprobs == pytest.approx(logp.values.tolist(), abs=TOLERANCE)

    played(play)


def test_many_long_prompts_at_once_with_seeds_do_not_end_the_server(played: Played) -> None:
    async def play(engine: ReplicatedEngine) -> None:
        sampling = [Sampling(max_tokens=4, seed=seed) for seed in range(32)]
        calls = [engine.generate(prompt_of(900, i), settings, session=f"s{i}") for i, settings in enumerate(sampling)]
        assert all(len(reply.ids) == 4 for reply in await asyncio.gather(*calls))

    played(play)


async def in_flight(engine: ReplicatedEngine, count: int, max_tokens: int) -> dict[str, asyncio.Task[Completion]]:
    """Requests of `count` sessions, none of which waits to be begun, with some ids sampled already."""
    before = await read_counter(engine, "generation_tokens_total")
    tasks = {}
    for number in range(count):
        sampling = Sampling(max_tokens=max_tokens, seed=number)
        call = engine.generate(prompt_of(150, number), sampling, session=f"s{number}")
        tasks[f"s{number}"] = asyncio.create_task(call)
    while await read_counter(engine, "generation_tokens_total") < before + 3 * count:
        await asyncio.sleep(0.02)
    while await read_counter(engine, "num_requests_running") < sum(not task.done() for task in tasks.values()):
        await asyncio.sleep(0.02)
    return tasks


async def read_counter(engine: ReplicatedEngine, name: str) -> float:
    """The sum of a number that the servers publish."""
    total = 0.0
    for replica in engine.replicas:
        assert isinstance(replica, VllmReplica)
        assert isinstance(replica.transport, VllmServer)
        lines = str(await replica.transport.get("/metrics")).splitlines()
        total += sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))
    return total


@pytest.mark.parametrize("mode", MODES)
def test_an_update_in_mid_flight_loses_no_id_and_every_id_bears_its_version(
    played: Played, reference: MakeReference, mode: PauseMode
) -> None:
    old, new = reference(0), reference(1)

    async def play(engine: ReplicatedEngine) -> None:
        tasks = await in_flight(engine, 64, 300)
        await engine.pause()
        caught = [task.done() is (mode == "abort") for task in tasks.values()]
        assert sum(caught) > 32, "the replies were over before the pause"
        await engine.update_weights(new.tensors(), 1)
        await engine.resume()
        firsts = [await task for task in tasks.values()]
        if mode == "abort":
            assert all(first.finish_reason == "abort" or len(first.ids) == 300 for first in firsts)
            assert all(set(first.policy_versions) <= {0} for first in firsts)
        rests = [resumed(engine, number, first) for number, first in enumerate(firsts)]
        replies = dict(enumerate(await asyncio.gather(*rests)))
        switches = {number: whole.policy_versions.count(0) for number, whole in replies.items()}
        for number, whole in replies.items():
            assert (len(whole.ids), whole.finish_reason) == (300, "length")
            assert whole.policy_versions == (0,) * switches[number] + (1,) * (300 - switches[number])
        gaps = []
        # Recomputing takes longer than sampling: every fourth, those that were furthest at the update among them.
        for number in sorted(replies, key=lambda number: switches[number] % 300, reverse=True)[::4]:
            prompt, sampling, whole = prompt_of(150, number), Sampling(max_tokens=300, seed=number), replies[number]
            switch = switches[number]
            before = Completion(whole.ids[:switch], whole.logprobs[:switch], (0,) * switch, "abort")
            assert switch == 0 or gap(old, prompt, before, sampling) < ROUNDING
            if switch < 300:
                gaps.append(gap(new, prompt, whole, sampling, switch))
        assert any(0 < switch < 300 for switch in switches.values())
        assert max(gaps) > WRONG if mode == "in_place" else max(gaps) < ROUNDING

    played(play, pause=mode)


async def resumed(engine: ReplicatedEngine, number: int, first: Completion, max_tokens: int = 300) -> Completion:
    """The whole reply: what was aborted goes on from its exact ids."""
    if first.finish_reason != "abort":
        return first
    rest = Sampling(max_tokens=max_tokens - len(first.ids), seed=number)
    second = await engine.generate([*prompt_of(150, number), *first.ids], rest, session=f"s{number}")
    return Completion(
        first.ids + second.ids,
        first.logprobs + second.logprobs,
        first.policy_versions + second.policy_versions,
        second.finish_reason,
    )


def test_requests_that_keep_their_cache_in_place_leave_nothing_of_it_to_later_ones(
    played: Played, reference: MakeReference
) -> None:
    prompt, sampling = prompt_of(300), Sampling(max_tokens=8, seed=1)
    new = reference(1)

    async def play(engine: ReplicatedEngine) -> None:
        await engine.generate(prompt, sampling, session="warm")
        before = await read_counter(engine, "generation_tokens_total")
        long = asyncio.create_task(engine.generate(prompt, Sampling(max_tokens=700, seed=2), session="long"))
        while await read_counter(engine, "generation_tokens_total") < before + 3:
            await asyncio.sleep(0.02)
        await engine.pause()
        await engine.update_weights(new.tensors(), 1)
        await engine.resume()
        reply = await engine.generate(prompt, sampling, session="warm")
        assert gap(new, prompt, reply, sampling) < TOLERANCE
        await engine.abort("long")
        assert set((await long).policy_versions) == {0, 1}

    played(play, pause="in_place")


def test_an_update_without_a_pause_is_whole_for_every_id(played: Played, reference: MakeReference) -> None:
    sampling = Sampling(max_tokens=800)

    async def play(engine: ReplicatedEngine) -> None:
        for version in range(1, 6):  # on a busy machine replies may end before the weights are there
            new = reference(version)
            tasks = await in_flight(engine, 4, 800)
            await engine.update_weights(new.tensors(), version)
            replies = await asyncio.gather(*tasks.values())
            updated = [number for number, reply in enumerate(replies) if version in reply.policy_versions]
            for number in updated:
                switch = replies[number].policy_versions.index(version)
                assert gap(new, prompt_of(150, number), replies[number], sampling, switch) < ROUNDING
            if len(updated) == len(replies):
                return
        raise AssertionError("no update met all replies in flight")

    played(play, bucket_mb=1)


# ---- what goes wrong silently elsewhere


def test_without_a_prefix_cache_reset_a_prompt_is_answered_by_the_old_policy(
    played: Played, vllm_server: ServerProcess, reference: MakeReference
) -> None:
    prompt = prompt_of(300)  # longer than a cache block of 128
    sampling = Sampling(max_tokens=8, seed=1, temperature=2.0)
    new = reference(1)

    async def naive(transport: VllmServer) -> Completion:
        """Loads the weights into a server whose cache holds the prompt, and asks again."""
        replies = []
        for _ in range(2):
            replies.append(
                await transport.generate(prompt, sampling_params(sampling), rid="a", cache_salt="always the same")
            )
            await transport.call("agentgym_load", base64.b64encode(safetensors_bytes(new.tensors())).decode())
        return read_vllm_completion(replies[1], name="it", num_prompt_ids=300, version=0)

    async def play(engine: ReplicatedEngine) -> None:
        async with closing(VllmServer(vllm_server.url, secret=vllm_server.command.secret)) as transport:
            reply = await naive(transport)
        assert gap(new, prompt, reply, sampling) > WRONG
        await engine.generate(prompt, sampling, session="a")
        await engine.update_weights(new.tensors(), 1)
        assert gap(new, prompt, await engine.generate(prompt, sampling, session="a"), sampling) < TOLERANCE

    played(play)


def test_a_packed_output_head_stays_old_where_vllm_reloads_and_is_new_where_we_load(
    played: Played, reference: MakeReference, start_vllm: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    prompt, sampling = prompt_of(40), Sampling(max_tokens=8, seed=1, temperature=2.0)
    new = reference(1)
    save_model_folder(new.decoder, tmp_path)
    plain = start_vllm("--enable-scale-out", "--no-enable-chunked-prefill")

    async def naive() -> Completion:
        async with closing(VllmServer(plain.url)) as transport:
            payload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
            await transport.post("/collective_rpc", payload)
            assert await transport.reset_prefix_cache(preempt=False)
            await transport.set_version("1")
            reply = await transport.generate(prompt, sampling_params(sampling), rid="a", cache_salt="new")
            with pytest.raises(EngineError, match="--worker-extension-cls"):
                await vllm_engine([transport], ServingSettings())
        return read_vllm_completion(reply, name="it", num_prompt_ids=40, version=1)

    async def play(engine: ReplicatedEngine) -> None:
        await engine.update_weights(new.tensors(), 1)
        assert gap(new, prompt, await engine.generate(prompt, sampling, session="a"), sampling) < TOLERANCE

    assert gap(new, prompt, asyncio.run(naive()), sampling) > WRONG
    played(play)


# ---- updates that do not arrive


class Lossy(VllmServer):
    """A server that one tensor of an update does not reach."""

    lost = "model.layers.2.mlp.up_proj.weight"

    async def call(self, method: str, *args: str) -> list[Any]:
        if method == "agentgym_load":
            tensors = safetensors.torch.load(base64.b64decode(args[0]))
            tensors_left = {name: tensor for name, tensor in tensors.items() if name != self.lost}
            args = (base64.b64encode(safetensors_bytes(tensors_left)).decode(),)
        return await super().call(method, *args)


def verify_as_on_a_gpu(engine: ReplicatedEngine) -> None:
    """Has the engine compare numbers that are computed where the weights are."""
    for replica in engine.replicas:
        sync = cast(VllmReplica, replica).sync
        sync.layout = replace(sync.layout, device="cuda")


def test_what_arrived_is_checked_by_sums_where_bytes_are_not_at_hand(played: Played, reference: MakeReference) -> None:
    prompt, sampling = prompt_of(40), Sampling(max_tokens=8, seed=1, temperature=2.0)
    new = reference(1)

    async def play(engine: ReplicatedEngine) -> None:
        verify_as_on_a_gpu(engine)
        report = await engine.update_weights(new.tensors(), 1)
        assert report.checksum
        assert gap(new, prompt, await engine.generate(prompt, sampling, session="a"), sampling) < TOLERANCE

    played(play)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_missing_tensor_is_named_and_nothing_samples_from_half_an_update(
    on_gpu: bool, vllm_server: ServerProcess, reference: MakeReference
) -> None:
    prompt, sampling = prompt_of(40), Sampling(max_tokens=8, seed=1)
    new = reference(1).tensors()

    async def run() -> None:
        async with closing(
            await vllm_engine([Lossy(vllm_server.url, secret=vllm_server.command.secret)], ServingSettings())
        ) as engine:
            if on_gpu:
                verify_as_on_a_gpu(engine)
            short = {name: tensor for name, tensor in new.items() if "layers.3.self_attn.k_proj" not in name}
            with pytest.raises(
                EngineError, match=r"leaves out 1 of 46 .*'model\.layers\.3\.self_attn\.k_proj\.weight'"
            ):
                await engine.update_weights(short, 1)
            with pytest.raises(EngineError, match=r"no tensor 'model.nrom.weight'.*did you mean 'model.norm.weight'"):
                await engine.update_weights({**new, "model.nrom.weight": new["model.norm.weight"]}, 1)
            with pytest.raises(EngineError, match=r"'model.norm.weight' has shape \(2,\)"):
                await engine.update_weights({**new, "model.norm.weight": torch.ones(2)}, 1)
            assert len((await engine.generate(prompt, sampling, session="a")).ids) == 8
            with pytest.raises(
                EngineError, match=r"stale weights: 1 of 34 .*'model\.layers\.2\.mlp\.gate_up_proj\.weight'"
            ):
                await engine.update_weights(new, 1)
            with pytest.raises(EngineError, match="half of an update"):
                await engine.generate(prompt, sampling, session="a")

    asyncio.run(run())


def test_a_tied_output_head_is_not_sent_and_another_one_is_refused(played: Played, reference: MakeReference) -> None:
    weights = reference(1).tensors()
    embedding = weights["model.embed_tokens.weight"]

    async def play(engine: ReplicatedEngine) -> None:
        report = await engine.update_weights({**weights, "lm_head.weight": embedding}, 1)
        assert report.num_tensors == 46
        with pytest.raises(EngineError, match="ties them"):
            await engine.update_weights({**weights, "lm_head.weight": embedding * 2}, 2)

    played(play)


def test_a_killed_server_loses_no_episode(vllm_python: str, reference: MakeReference, tmp_path: Path) -> None:
    """The process that holds the model of one of two servers is killed: its front answers errors for a while then."""
    model = reference(1)
    settings = ServingSettings(stream=True)
    config = ServerLaunch(python=vllm_python, device="cpu", replicas=2, log_folder=str(tmp_path), serving=settings)

    async def run() -> None:
        async with closing(await open_vllm(config, embedded_folder())) as engine:
            await engine.update_weights(model.tensors(), 1)
            tasks = await in_flight(engine, 16, 600)
            kill_core(engine.replicas[0])
            firsts = [await task for task in tasks.values()]
            rests = [resumed(engine, number, first, 600) for number, first in enumerate(firsts)]
            for number, whole in enumerate(await asyncio.gather(*rests)):
                prompt, sampling = prompt_of(150, number), Sampling(max_tokens=600, seed=number)
                assert len(whole.ids) == 600
                assert gap(model, prompt, whole, sampling) < ROUNDING
            for number in range(16):  # if all replies had ended before the kill, a session finds out now
                await engine.generate(prompt_of(150, number), Sampling(max_tokens=1), session=f"s{number}")
            assert engine.router.alive == [1]

    asyncio.run(run())


def kill_core(replica: Replica) -> None:
    """Kills the process of a server that holds the model."""
    assert isinstance(replica, VllmReplica)
    assert isinstance(replica.transport, VllmServer)
    assert replica.transport.process is not None
    processes = psutil.Process(replica.transport.process.pid).children(recursive=True)
    doomed = [process for process in processes if "EngineCore" in process.name() + "".join(process.cmdline())]
    assert doomed, [process.cmdline() for process in processes]
    for process in doomed:
        with suppress(psutil.NoSuchProcess):  # it ends with the one before it
            process.kill()


# ---- vLLM in the process that asks


def test_async_llm_in_process_samples_what_the_trainer_computes_over_updates(
    vllm_python: str, reference: MakeReference, told_by: Callable[..., Any], tmp_path: Path
) -> None:
    models = reference(0), reference(1)
    for version, model in enumerate(models):
        save_model_folder(model.decoder, tmp_path / str(version))
    report = told_by(vllm_python, "embedded_vllm.py", tmp_path / "0", tmp_path / "1")
    for version, temperature, ids, logprobs, versions, checksum in report["replies"]:
        model, sampling = models[version], Sampling(max_tokens=20, temperature=temperature)
        reply = Completion(tuple(ids), tuple(logprobs), tuple(versions), "length")
        assert set(versions) == {version}
        assert checksum == overall_digest(fused_digests(model.tensors()))
        assert gap(model, report["prompt"], reply, sampling) < TOLERANCE
    assert set(report["versions"]) == {1, 2}
