"""An adapter alone reaches a real SGLang server: logprobs are those of the merged model, and a lost one is named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_connection import ServerConnection
from agentgym.engines.sglang.engine import open_sglang
from agentgym.errors import EngineError
from agentgym.model.published_weights import LoraWeights

pytestmark = pytest.mark.engine
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FLAGS = ["--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native", "--lora-target-modules", *MODULES]
PROMPT = tuple(range(5, 45))


def gap(model: Any, completion: Completion) -> float:
    """The largest difference between the reply's logprobs and the model's."""
    return float(max(model.gaps(PROMPT, completion.ids, completion.logprobs)))


def using(url: str, play: Callable[[ReplicatedEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = await open_sglang(ServerConfig(urls=(url,)), embedded_folder())
        try:
            await play(engine)
        finally:
            await engine.close()

    asyncio.run(run())


async def send(engine: ReplicatedEngine, weights: LoraWeights, version: int) -> None:
    await engine.pause()
    report = await engine.update_weights(weights, version)
    assert report.num_tensors == 2 * len(MODULES) * 4
    await engine.resume()


def test_an_adapter_is_sent_alone_stays_with_its_requests_and_is_missed_when_lost(
    start_sglang: Any, reference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = start_sglang(*FLAGS).url
    base, first_model, second_model = (reference(0) for _ in range(3))
    first, second = first_model.merge_adapter(MODULES, 0), second_model.merge_adapter(MODULES, 1)

    async def arrives(engine: ReplicatedEngine) -> None:
        sampling = Sampling(max_tokens=24)
        assert gap(base, await engine.generate(PROMPT, sampling, session="a")) < 1e-4
        await send(engine, first, 1)
        reply = await engine.generate(PROMPT, sampling, session="b")
        assert set(reply.policy_versions) == {1}
        assert gap(first_model, reply) < 1e-4 < gap(base, reply)
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=400), session="c"))
        await asyncio.sleep(0.3)
        await send(engine, second, 2)
        reply = await engine.generate(PROMPT, sampling, session="d")
        assert set(reply.policy_versions) == {2}
        assert gap(second_model, reply) < 1e-4
        completion = await running
        assert set(completion.policy_versions) == {1}
        assert gap(first_model, completion) < 1e-3 < gap(second_model, completion)  # over 400 ids the rounding adds up

    async def is_missed(engine: ReplicatedEngine) -> None:
        with pytest.raises(EngineError, match=r"stale adapter: .* has the adapters"):
            await send(engine, reference(0).merge_adapter(MODULES, 2), 3)
        await engine.resume()

    using(url, arrives)
    post = ServerConnection.post

    async def losing(self: ServerConnection, path: str, payload: Any, **options: Any) -> Any:
        if path == "/load_lora_adapter_from_tensors":
            return {"success": True, "loaded_adapters": {"policy-of-another-run": "__tensor__"}}
        return await post(self, path, payload, **options)

    monkeypatch.setattr(ServerConnection, "post", losing)
    using(url, is_missed)
