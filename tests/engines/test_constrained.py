"""Replies that a real server holds to the tools' schemas, and what their logprobs are."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentgym.chat_templates import renderer_for
from agentgym.chat_templates.formats.grammar import NAME
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.embedded import embedded_folder
from agentgym.engines.openai.config import ChatEndpointConfig
from agentgym.engines.servers.http import SERVER_SECRET
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.server_process import ServerProcess
from agentgym.engines.sglang.engine import open_sglang
from agentgym.engines.vllm.engine import open_vllm
from agentgym.evaluation.play.endpoint import endpoint_loop
from agentgym.rollout import ConstrainedLoop, Episode, Limits, RolloutLoop, Sampler, SamplingConfig
from agentgym.rollout.episode.episode_loop import EpisodeLoop
from agentgym.trajectory import Source, Task, Trajectory
from agentgym.types import MalformedCall

pytestmark = pytest.mark.engine

Open = Callable[[], Awaitable[ReplicatedEngine]]
HOT = 1.6
"""A temperature at which the embedded model breaks many of its calls."""
ENV = "GuessNumber-v0"
"""Its one argument is an integer: where a string is free, the schema allows a closing tag in it, and a reply that its
limit cuts there is read as broken."""
FAULTS = ("malformed", "unknown_tool", "invalid_arguments")
SCHEMA = {
    "type": "object",
    "properties": {"direction": {"type": "string", "enum": ["north", "south"]}},
    "required": ["direction"],
    "additionalProperties": False,
}
ACCEPTS = """
import json, sys
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts
print(json.dumps([accepts(Grammar.from_structural_tag(tag), text) for tag, text in json.load(sys.stdin)]))
"""


@pytest.fixture(params=["sglang", "vllm"])
def server(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Name and URL."""
    return request.param, request.getfixturevalue(f"{request.param}_server").url


def opened(server: tuple[str, str]) -> Awaitable[ReplicatedEngine]:
    name, url = server
    if name == "sglang":
        return open_sglang(ServerConfig(urls=(url,)), embedded_folder())
    return open_vllm(ServerConfig(urls=(url,)), embedded_folder())


def played(begun: Callable[[], Awaitable[EpisodeLoop]], num_episodes: int = 24) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        loop = await begun()
        sampler = Sampler(loop)
        try:
            return await sampler.run([Episode(Task(ENV, number), f"0/{number}") for number in range(num_episodes)])
        finally:
            sampler.close()
            await loop.close()

    return asyncio.run(run())


def sampled(server: tuple[str, str], *, constrained: bool) -> list[Trajectory]:
    async def begun() -> RolloutLoop:
        engine, renderer = await opened(server), renderer_for(embedded_folder())
        loop = ConstrainedLoop if constrained else RolloutLoop
        return loop(engine, renderer, Limits(max_turns=4), SamplingConfig(temperature=HOT))

    return played(begun)


def counted(trajectories: list[Trajectory]) -> Counter[str]:
    """How many calls were read, could not be read, or were refused by their tool's schema."""
    counts: Counter[str] = Counter()
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        for call in turn.message.tool_calls:
            broken = isinstance(call, MalformedCall)
            counts["truncated" if broken and call.truncated else "malformed" if broken else "read"] += 1
        counts.update(result.error for result in turn.tool_results if result.error not in (None, "malformed"))
    return counts


def num_faults(counts: Counter[str]) -> int:
    return sum(counts[fault] for fault in FAULTS)


def test_calls_are_held_to_the_schemas_of_their_tools(server: tuple[str, str]) -> None:
    free, strict = (counted(sampled(server, constrained=constrained)) for constrained in (False, True))
    assert num_faults(free) > 0, "nothing to hold"
    assert strict["read"] > 10
    assert num_faults(strict) == 0


def test_the_logprobs_are_nearly_the_models_until_a_call_and_never_below_them(
    server: tuple[str, str], reference: Callable[..., Any]
) -> None:
    model, mark = reference(0), renderer_for(embedded_folder()).tokenizer.backend.token_to_id("<tool_call>")
    before, behind = [], []
    for row in (row for trajectory in sampled(server, constrained=True) for row in trajectory.rows):
        start = 0
        for span in row.spans:
            if span.source is Source.POLICY:
                assert span.excluded
                own = model.logprobs(row.ids[:start], span.ids, HOT)
                gains = [there - here for there, here in zip(span.logprobs or (), own, strict=True)]
                place = span.ids.index(mark) + 1 if mark in span.ids else len(span.ids)
                before += gains[:place]
                behind += gains[place:]
            start += len(span.ids)
    assert min(before + behind) > -1e-4
    assert sum(before) / len(before) < 0.01, "of free text the grammar takes nothing away but special tokens"
    assert max(behind) > 0.1


def test_a_chat_endpoint_holds_calls_to_strict_tools(sglang_server: ServerProcess) -> None:
    def chatted(*, strict: bool) -> list[Trajectory]:
        config = ChatEndpointConfig(strict_tools=strict, api_key_env=SERVER_SECRET)
        sampling = SamplingConfig(temperature=2.0)
        return played(lambda: endpoint_loop(f"{sglang_server.url}/v1", config, Limits(max_turns=4), sampling))

    def broken(trajectories: list[Trajectory]) -> int:
        """Calls with a fault, and those of whole replies that the server could not read and left in the text."""
        whole = (turn for trajectory in trajectories for turn in trajectory.turns if turn.finish_reason == "stop")
        return sum("<tool_call>" in turn.message.content for turn in whole) + num_faults(counted(trajectories))

    free, strict_replies = chatted(strict=False), chatted(strict=True)
    assert counted(free)["read"] < counted(strict_replies)["read"] / 2, "nothing to hold"
    assert counted(strict_replies)["read"] > 10
    assert broken(strict_replies) == 0
    assert not any(row.mask.any() for trajectory in strict_replies for row in trajectory.rows)


def test_xgrammar_accepts_each_familys_calls_and_rejects_what_the_schema_forbids(sglang_python: str) -> None:
    from agentgym.types import ToolSpec

    tools = [ToolSpec("go", "Walk.", SCHEMA), ToolSpec("wait", "Wait.", {"type": "object", "properties": {}})]
    pairs: list[tuple[str, str]] = []
    for entry in {known_format.name: known_format for known_format in FORMATS.values()}.values():
        if entry.grammar is None:
            continue
        tag, begin = entry.grammar.structural_tag(tools), entry.grammar.begin.replace(NAME, "go")
        good, bad = '{"direction": "north"}', '{"direction": "up"}'
        if entry.grammar.arguments == "qwen_xml_parameter":
            good, bad = (f"<parameter=direction>\n{word}\n</parameter>" for word in ("north", "up"))
        call = begin + good + entry.grammar.end
        pairs += [(tag, text) for text in (call, f"I go. {call}\n{call}", "No call.")]
        pairs += [(tag, text) for text in (begin + bad + entry.grammar.end, call.replace("go", "fly"))]
    result = subprocess.run(
        [sglang_python, "-c", ACCEPTS], input=json.dumps(pairs), capture_output=True, text=True, timeout=120, check=True
    )
    verdicts = json.loads(result.stdout.splitlines()[-1])
    assert [verdicts[start : start + 5] for start in range(0, len(verdicts), 5)] == [
        [True, True, True, False, False]
    ] * (len(verdicts) // 5)
