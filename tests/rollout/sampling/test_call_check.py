"""The chat format is named as the cause of missing calls only where it does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs import ToolEnv
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.call_check import describe_missing_calls
from agentgym.tools import tool
from agentgym.trajectory import Trajectory
from agentgym.types import Task

END = "<|im_end|>"
FORMAT = "call format"
ASIDE = "calls are read, and none can be run (0 malformed, 0 cut by the end of their reply, 4 unknown tools"


class Lamp(ToolEnv):
    """A lamp."""

    runs_inline = True
    max_turns = 2

    def start(self, options: dict[str, Any]) -> str:
        """It is dark."""
        return "dark"

    @tool
    def light(self, level: int = 1) -> str:
        """Lights it."""
        return "bright"


@pytest.fixture(scope="module")
def play(tokenizer_folder: Path) -> Callable[[str], Sequence[Trajectory]]:
    """`play(text)` returns two episodes whose replies are this text."""
    renderer = renderer_for(tokenizer_folder)

    def episodes(text: str) -> Sequence[Trajectory]:
        ids = renderer.tokenizer.encode(text + END)
        loop = RolloutLoop(ScriptedEngine(lambda *_: ids, vocab_size=renderer.vocab_size), renderer, Limits())
        return [asyncio.run(loop.run(Lamp(), Episode(Task("Lamp-v0", seed), "g", 0, 0))) for seed in range(2)]

    return episodes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>\n{"name": "light", "arguments": {}}\n</tool_call>', ""),
        ("I light it.", "replies hold no calls"),
        ('<tool_call>\n{"name": "ligt", "arguments": {}}\n</tool_call>', ASIDE),
        ('<tool_call>\n{"name": "light", "arguments": {"level": "no"}}\n</tool_call>', "4 with invalid arguments; the"),
        ("<tool_call>\n{light\n</tool_call>", f"does the chat template's {FORMAT} fit? (4 malformed"),
        (
            "<function=light>\n<parameter=level>\n3\n</parameter>\n</function>",
            "calls as the format 'qwen3_coder' has them",
        ),
        ('[TOOL_CALLS][{"name": "light", "arguments": {}}]', "calls as the format 'mistral' has them"),
    ],
)
def test_missing_calls_are_explained_by_what_the_replies_hold(
    text: str, reason: str, play: Callable[[str], Sequence[Trajectory]]
) -> None:
    sentence = describe_missing_calls(play(text))
    assert reason in sentence if reason else sentence == ""
    assert (FORMAT in sentence) == (FORMAT in reason or "as the format" in reason)
    assert "\n" not in sentence


def test_a_few_valid_calls_among_others_are_counted_unless_an_episode_succeeds(
    play: Callable[[str], Sequence[Trajectory]],
) -> None:
    call = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>\n'
    fails = play("".join(call % name for name in ("ligt", "lite", "light")))
    assert "calls are read, and 4 of 12 can be run (0 malformed" in describe_missing_calls(fails)
    assert describe_missing_calls(play(call % "ligt" + call % "light")) == ""
    won = [replace(episode, metrics={**episode.metrics, "success": 1.0}) for episode in fails]
    assert describe_missing_calls(won) == ""
