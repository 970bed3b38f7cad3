"""Replies that an engine holds to the tools' schemas: what is asked of it, and what is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest

from agentgym.chat_templates import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError
from agentgym.rollout.episode.constrained import ConstrainedLoop
from agentgym.rollout.episode.episode import Episode
from agentgym.tools import tool
from agentgym.types import Task

CALL = '<tool_call>\n{"name": "ring", "arguments": {"times": 2}}\n</tool_call><|im_end|>'


class Bell(ToolEnv):
    """A bell."""

    runs_inline = True

    def start(self, options: dict[str, object]) -> str:
        return "Ring."

    @tool
    def ring(self, times: int) -> str:
        """Rings."""
        self.end(success=True)
        return "ding"


class Constraining(ScriptedEngine):
    """Notes what it is asked for, and gives the first reply up in its middle."""

    takes_grammar = True

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__(lambda *_: ids)
        self.requests: list[tuple[int, Sampling]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        self.requests.append((len(prompt_ids), sampling))
        completion = await super().generate(prompt_ids, sampling, session=session)
        if len(self.requests) > 1:
            return completion
        return Completion(completion.ids[:3], completion.logprobs[:3], completion.policy_versions[:3], "abort")


def test_each_reply_is_held_to_the_tools_and_is_in_no_loss(renderer: Renderer, raw: Callable[[str], list[int]]) -> None:
    ids = raw(CALL)
    engine = Constraining(ids)
    loop = ConstrainedLoop(engine, renderer)
    trajectory = asyncio.run(loop.run(Bell(), Episode(Task("Bell-v0", 0), "0/0")))
    (first, sampling), (again, _) = engine.requests
    assert first == again, "a grammar begins with the reply: one that was given up is sampled anew"
    (tag,) = json.loads(sampling.grammar)["format"]["tags"]
    assert tag["begin"] == '<tool_call>\n{"name": "ring", "arguments": '
    assert tag["content"]["json_schema"]["properties"]["times"]["type"] == "integer"
    (row,) = trajectory.rows
    assert not row.mask.any()
    assert row.sampled_mask.sum() == len(ids)


def test_an_engine_or_a_family_that_cannot_is_refused_before_anything_is_played(renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="ScriptedEngine takes no grammar"):
        ConstrainedLoop(ScriptedEngine(lambda *_: [1]), renderer)
    with pytest.raises(ConfigError, match="the format kimi_k2 says no grammar"):
        ConstrainedLoop(Constraining([1]), renderer_for(embedded_folder(), "kimi_k2"))
