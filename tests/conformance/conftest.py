"""What every case runs on: two chat formats (the embedded template over a small tokenizer, the real Qwen3), and two
engines (replies from a script, and a small model that has learned the script by heart)."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import agentgym.chat_templates
from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.engines.protocol import Completion, Engine, Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import EngineError
from agentgym.rollout import Limits, RolloutLoop, Sampler
from agentgym.trajectory import Group
from agentgym.types import Task

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
TASK = Task("Room-v0", 3)
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


@pytest.fixture(scope="session", params=["embedded-scripted", "embedded-local", "qwen3-scripted"])
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The chat format and the engine; a model over Qwen3's whole vocabulary would be no small one."""
    chat_format, _, engine = str(request.param).partition("-")
    if engine == "local":
        pytest.importorskip("torch")
    return chat_format, engine


@pytest.fixture(scope="session")
def tokenizer(setting: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    if setting[0] == "embedded":
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


@dataclass
class Script:
    """What the engine says in each episode: `replies` in turn, from the first one again after the last."""

    replies: Sequence[Sequence[int]]
    fails: Callable[[str], bool]
    """Whether the engine breaks in this session."""
    last_turns: dict[str, int] = field(default_factory=dict)
    pairs: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Every prompt with the reply to it."""

    def __call__(self, session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        turn = self.last_turns[session] = self.last_turns.get(session, -1) + 1
        if self.fails(session):
            raise EngineError("out of memory")
        reply = list(self.replies[turn % len(self.replies)])
        self.pairs.append((list(prompt_ids), reply))
        return reply


class Heard:
    """An engine, and every prompt that it was sent with what it said."""

    def __init__(self, engine: Engine, fails: Callable[[str], bool]) -> None:
        self.engine, self.fails = engine, fails
        self.pairs: list[tuple[list[int], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        if self.fails(session):
            raise EngineError("out of memory")
        completion = await self.engine.generate(prompt_ids, sampling, session=session)
        self.pairs.append((list(prompt_ids), list(completion.ids)))
        return completion


class Stage(Protocol):
    """Plays a group of episodes: the group, and the prompts that the engine was sent."""

    def __call__(
        self,
        replies: Sequence[Sequence[int]],
        make: Callable[[Task], ToolEnv],
        limits: Limits | None = None,
        *,
        task: Task = ...,
        group_size: int = ...,
        fails: Callable[[str], bool] = ...,
        **settings: Any,
    ) -> tuple[Group, list[list[int]]]: ...


@pytest.fixture
def stage(setting: tuple[str, str], renderer: Renderer) -> Stage:
    """The engine says `replies`; where it is the in-process one, its model learns them by heart from a first play."""

    def play(
        replies: Sequence[Sequence[int]],
        make: Callable[[Task], ToolEnv],
        limits: Limits | None = None,
        *,
        task: Task = TASK,
        group_size: int = 1,
        fails: Callable[[str], bool] = lambda session: False,
        **settings: Any,
    ) -> tuple[Group, list[list[int]]]:
        async def with_engine(engine: Engine) -> Group:
            sampler = Sampler(RolloutLoop(engine, renderer, limits, **settings), make)
            try:
                (group,) = await sampler.sample([task], group_size)
            finally:
                sampler.close()
                await engine.close()
            return group

        script = Script(replies, fails)
        group = asyncio.run(with_engine(ScriptedEngine(script)))
        if setting[1] == "scripted":
            return group, [prompt for prompt, _ in script.pairs]
        heard = Heard(model_engine(script.pairs, renderer.vocab_size), fails)
        group = asyncio.run(with_engine(heard))
        assert sorted(heard.pairs) == sorted(script.pairs), "the model did not say what it has learned"
        return group, [prompt for prompt, _ in heard.pairs]

    return play


def model_engine(pairs: Sequence[tuple[list[int], list[int]]], vocab_size: int) -> Engine:
    """The in-process engine with a model that says these replies to these prompts, at a probability of nearly 1.

    The model is drawn at random; its output matrix is the one that gives the next id of each reply a logit of 40 and
    any other id 0, exactly, at the states that the model itself has there.
    """
    import torch

    from agentgym.engines.local.config import LocalEngineConfig
    from agentgym.engines.local.engine import LocalEngine
    from agentgym.model.decoder import Decoder, DecoderConfig
    from agentgym.model.packed_layout import PackedLayout

    shape = {"width": 256, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_width": 32, "ffn_width": 64}
    config = DecoderConfig(
        family="qwen3", vocab_size=vocab_size, context_window=4096, qk_norm=True, tied=False, **shape
    )
    model = Decoder(config).initialize(0)
    states, targets = [], []
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
        for prompt, reply in {tuple(prompt): (prompt, reply) for prompt, reply in pairs}.values():
            ids = torch.tensor([*prompt, *reply[:-1]])
            states.append(model.hidden_states(ids, PackedLayout([len(ids)]))[-len(reply) :])
            targets += reply
        logits = 40.0 * torch.nn.functional.one_hot(torch.tensor(targets), vocab_size).double()
        assert model.head is not None
        model.head.copy_((torch.linalg.pinv(torch.cat(states).double()) @ logits).T)
    return LocalEngine(model, LocalEngineConfig(num_slots=8))
