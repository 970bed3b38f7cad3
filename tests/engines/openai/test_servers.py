"""`agentgym eval --policy http://...` against the real servers: tools, exact ids, and a record that holds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agentgym.chat_templates.families import renderer_for
from agentgym.embedded import embedded_folder
from agentgym.engines.openai.endpoint import ChatEndpoint, ChatEndpointConfig, ContextExceeded
from agentgym.engines.protocol import Sampling
from agentgym.engines.servers.http import SERVER_SECRET
from agentgym.evaluation import EvalConfig, EvalResult, evaluate, verify_run
from agentgym.model.model_folder import load_decoder
from agentgym.model.packed_layout import PackedLayout
from agentgym.types import Message, ToolCall

pytestmark = pytest.mark.engine
SERVERS = ["sglang_server", "vllm_server"]
NUM_TASKS = 24
ENDPOINT = ChatEndpointConfig(api_key_env=SERVER_SECRET)


def play(url: str, folder: Path, endpoint: ChatEndpointConfig = ENDPOINT) -> EvalResult:
    config = EvalConfig(env="TextGame-v0", policy=url, num_tasks=NUM_TASKS, concurrency=8, endpoint=endpoint)
    return evaluate(config, output=folder)


@pytest.mark.parametrize("name", SERVERS)
def test_a_real_server_is_evaluated_with_tools_and_exact_ids(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    result = play(request.getfixturevalue(name).url, tmp_path / "run")
    assert result.summary.num_episodes == NUM_TASKS and result.summary.num_failed == 0
    calls = [
        call for trajectory in result.trajectories for turn in trajectory.turns for call in turn.message.tool_calls
    ]
    assert sum(isinstance(call, ToolCall) for call in calls) > 0.8 * len(calls) > 0
    assert result.use is not None and result.use.num_without_ids == 0
    assert result.use.completion_tokens == sum(trajectory.num_trained_tokens for trajectory in result.trajectories)
    assert (result.use.first_token_s is None) is (name == "sglang_server")
    report = verify_run(tmp_path / "run", renderer_for(embedded_folder()))
    assert report.ok, "\n".join(report.lines())
    assert max(_differences(result)) < 1e-4


def _differences(result: EvalResult) -> list[float]:
    """Of the recorded logprobs from those that the embedded model gives the recorded ids."""
    model = load_decoder(embedded_folder())
    differences: list[float] = []
    for row in (row for trajectory in result.trajectories for row in trajectory.rows):
        ids = torch.tensor(row.ids)
        with torch.inference_mode():
            logits = model.logits(model.hidden_states(ids[:-1], PackedLayout((len(ids) - 1,))))
        again = logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        differences += (again - torch.tensor(row.logprobs[1:]))[torch.tensor(row.mask[1:])].abs().tolist()
    return differences


@pytest.mark.parametrize("name", SERVERS)
def test_without_ids_a_real_server_streams(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    result = play(request.getfixturevalue(name).url, tmp_path / "run", replace(ENDPOINT, token_ids=False))
    assert result.summary.num_episodes == NUM_TASKS
    assert result.use is not None and result.use.num_without_ids == NUM_TASKS
    assert result.use.first_token_s is not None and result.use.completion_tokens > 0
    assert verify_run(tmp_path / "run").ok


@pytest.mark.parametrize("name", SERVERS)
def test_a_real_server_reports_a_full_window(name: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(name).url

    async def ask() -> None:
        async with ChatEndpoint(url, ENDPOINT) as endpoint:
            await endpoint.open()
            assert endpoint.context_window == 1024
            reply = await endpoint.complete([Message("user", "go north " * 200)], (), Sampling(max_tokens=900))
            assert reply.usage.prompt_tokens + reply.usage.completion_tokens <= 1024
            with pytest.raises(ContextExceeded):
                await endpoint.complete([Message("user", "go north " * 2000)])

    asyncio.run(ask())
