"""A byte-level ChatML tokenizer made on the spot, and the scripts that speak it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import agentgym.chat_templates
from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.tokenizer import ChatTokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    template = (Path(agentgym.chat_templates.__file__).parent / "embedded.jinja").read_text(encoding="utf-8")
    return ChatTokenizer(backend, template, special_tokens={"eos_token": "<|im_end|>"})


@pytest.fixture(scope="session")
def renderer(tokenizer: ChatTokenizer) -> Renderer:
    return renderer_for(tokenizer)


@pytest.fixture(scope="session")
def raw(tokenizer: ChatTokenizer) -> Callable[[str], list[int]]:
    """The ids of a text in which marks are marks, as a model would sample it."""
    return lambda text: list(tokenizer.backend.encode(text, add_special_tokens=False).ids)


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture(scope="session")
def worst_lateness() -> Callable[[Callable[[], Awaitable[object]]], float]:
    """The most seconds that a task was late which woke up every millisecond while the event loop did the work.

    The work is done three times and the least is returned: what the work itself holds up is late each time, what
    another process holds up is not.
    """

    async def measure(work: Callable[[], Awaitable[object]]) -> float:
        worst = 0.0

        async def tick() -> None:
            nonlocal worst
            while True:
                started = time.perf_counter()
                await asyncio.sleep(0.001)
                worst = max(worst, time.perf_counter() - started - 0.001)

        clock = asyncio.create_task(tick())
        await asyncio.sleep(0.01)
        await work()
        await asyncio.sleep(0.002)
        clock.cancel()
        return worst

    def least_of_three(work: Callable[[], Awaitable[object]]) -> float:
        gc.collect()
        gc.freeze()  # what other tests have left would be looked through while the work is done
        return min(asyncio.run(measure(work)) for _ in range(3))

    return least_of_three
