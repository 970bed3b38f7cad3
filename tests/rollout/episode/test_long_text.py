"""The event loop goes on while long texts are rendered and parsed, and their episodes are those of one thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.tokenizer import LONG_TEXT, ChatTokenizer
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.rollout.episode import long_text
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.history import History
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.trajectory import Trajectory
from agentgym.types import Message, Task

Lateness = Callable[[Callable[[], Awaitable[object]]], float]
Raw = Callable[[str], list[int]]
TEXT = "You stand in a hall. There are doors to the north and to the east. "


class Library(TextEnv):
    """Answers with as many characters as it is told, for two turns."""

    runs_inline = True

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.text = (TEXT * (num_characters // len(TEXT) + 1))[:num_characters]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self.num_steps = 0
        return self.text, {}

    def step(self, action: str) -> StepResult:
        self.num_steps += 1
        return self.text, 0.5, self.num_steps == 2, False, {}


async def play(renderer: Renderer, reply: list[int], num_characters: int, history: History = "append") -> Trajectory:
    limits = Limits(max_turns=4, turn_tokens=len(reply))
    engine = ScriptedEngine(lambda session, ids, sampling: reply, context_window=10_000_000)
    loop = RolloutLoop(engine, renderer, limits, history=history)
    return await loop.run(Library(num_characters), Episode(Task("Library-v0", 1)))


@pytest.mark.long
def test_the_event_loop_waits_for_no_long_text(renderer: Renderer, raw: Raw, worst_lateness: Lateness) -> None:
    num_characters = 1_000_000
    started = time.perf_counter()
    renderer.render([Message("user", Library(num_characters).text)])
    alone_s = time.perf_counter() - started
    late_s = worst_lateness(lambda: play(renderer, raw("I read.<|im_end|>"), num_characters))
    assert late_s < max(alone_s / 2, 0.1)


@pytest.mark.parametrize("history", ["append", "rerender"])
@pytest.mark.parametrize("num_characters", [10, LONG_TEXT + 1])
def test_an_episode_is_the_same_whichever_thread_renders_it(
    renderer: Renderer, raw: Raw, monkeypatch: pytest.MonkeyPatch, num_characters: int, history: History
) -> None:
    reply = raw("I read." + "<tool_call>" * 20 + "<|im_end|>")
    monkeypatch.setattr(long_text, "LONG_TEXT", 10**9)
    here = asyncio.run(play(renderer, reply, num_characters, history))
    monkeypatch.setattr(long_text, "LONG_TEXT", -1)
    assert asyncio.run(play(renderer, reply, num_characters, history)) == here


def test_threads_encode_long_and_short_texts_at_once(tokenizer: ChatTokenizer) -> None:
    long, short = TEXT * 3000, TEXT
    expected = list(tokenizer.backend.encode(long, add_special_tokens=False).ids)
    encodings: list[list[int]] = []
    threads = [threading.Thread(target=lambda: encodings.append(tokenizer.encode(long))) for _ in range(3)]
    for thread in threads:
        thread.start()
    ids = tokenizer.encode(short)
    while any(thread.is_alive() for thread in threads):
        assert tokenizer.encode(short) == ids
        assert tokenizer.decode(ids) == short
    assert encodings == [expected] * 3
    assert tokenizer.decode(expected) == long
