"""The two chat formats that every case runs on: the embedded template over a small tokenizer, and the real Qwen3."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import agentgym.chat_templates
from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.tokenizer import ChatTokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
MARKS = (
    *("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)


def small_tokenizer() -> ChatTokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(['{"name": "look", "arguments": {}}', "You look around the room."] * 5, trainer)
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    template = (Path(agentgym.chat_templates.__file__).parent / "embedded.jinja").read_text(encoding="utf-8")
    return ChatTokenizer(backend, template, special_tokens={"eos_token": "<|im_end|>"})


@pytest.fixture(scope="session", params=["embedded", "qwen3"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    if request.param == "embedded":
        return small_tokenizer()
    if not SHARED.is_dir():
        pytest.skip(f"the shared test data {SHARED} is not beside this checkout")
    target = tmp_path_factory.mktemp("tokenizers")
    with tarfile.open(SHARED / "tokenizers" / "qwen3.tar.xz") as archive:
        archive.extractall(target, filter="data")
    template = (SHARED / "chat_templates" / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
    (target / "qwen3" / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ChatTokenizer.load(target / "qwen3")


@pytest.fixture(scope="session")
def renderer(tokenizer: ChatTokenizer) -> Renderer:
    return renderer_for(tokenizer)


@pytest.fixture(scope="session")
def raw(tokenizer: ChatTokenizer) -> Callable[[str], list[int]]:
    """The ids of a text in which marks are marks, as a model would sample it."""
    return lambda text: list(tokenizer.backend.encode(text, add_special_tokens=False).ids)
