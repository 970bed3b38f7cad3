"""A model so small that a step takes milliseconds, and groups of episodes whose logprobs are the model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.language_model import LanguageModel
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.batch.credits import credit_groups
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

TASK = Task("TextGame-v0", seed=7)


def make_model(
    *,
    seed: int = 0,
    vocab_size: int = 40,
    tied: bool = True,
    window: int = 512,
    num_kv_heads: int = 2,
    qkv_bias: bool = False,
) -> Decoder:
    """About ten thousand parameters; weights large enough that its predictions are far from uniform."""
    config = DecoderConfig(
        family="qwen3",
        vocab_size=vocab_size,
        width=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_width=8,
        ffn_width=48,
        context_window=window,
        qk_norm=True,
        qkv_bias=qkv_bias,
        tied=tied,
    )
    model = Decoder(config).initialize(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.linspace(-1, 1, len(parameter)))
    return model


@torch.no_grad()
def logprobs_of(model: LanguageModel, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """The model's logprob of every id after the first, by the plain formula."""
    ids_T = torch.tensor(ids)
    logits_TV = model.logits(model.hidden_states(ids_T[:-1], PackedLayout([len(ids) - 1]))) / temperature
    logp_TV = logits_TV.log_softmax(-1)
    logprobs: list[float] = logp_TV.gather(1, ids_T[1:, None])[:, 0].tolist()
    return logprobs


def played(
    model: LanguageModel, ids: Sequence[int], prompt: int, reward: float, member: int, group: str = "g"
) -> Trajectory:
    """An episode of one turn: `ids[prompt:]` were sampled, with the model's own logprobs."""
    logprobs = tuple(logprobs_of(model, ids)[prompt - 1 :])
    reply = TokenSpan(tuple(ids[prompt:]), Source.POLICY, logprobs, (0,) * len(logprobs))
    return Trajectory(
        task=TASK,
        group=group,
        member=member,
        rows=(Row((TokenSpan(tuple(ids[:prompt]), Source.PROMPT), reply)),),
        turns=(Turn(Message("assistant", "x"), reward),),
        status=Status.COMPLETED,
        stop_reason=StopReason.TERMINATED,
    )


def batch_of(
    model: LanguageModel, *, num_groups: int = 3, seed: int = 0, shared: int = 0, longer: int = 0
) -> TrainingBatch:
    """Groups of four replies of unequal lengths, rewarded 0, 1, 2, 3; `shared` ids in front are those of the group, and
    replies are `longer` than a dozen ids."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for index in range(num_groups):
        members = []
        prompt = torch.randint(0, model.vocab_size, (shared,), generator=generator).tolist()
        for member in range(4):
            length = 6 + longer + int(torch.randint(0, 12, (), generator=generator))
            ids = torch.randint(0, model.vocab_size, (length,), generator=generator).tolist()
            members.append(played(model, prompt + ids, shared + 4, float(member), member, str(index)))
        groups.append(Group(str(index), TASK, tuple(members)))
    return build_batch(groups, credit_groups(groups, "grpo"), aggregation="token-mean")


@pytest.fixture
def tiny() -> Callable[..., Decoder]:
    """`tiny(seed=0, vocab_size=40, tied=True, window=512, num_kv_heads=2, qkv_bias=False)` makes a model."""
    return make_model


@pytest.fixture
def fresh_batch() -> Callable[..., TrainingBatch]:
    """`fresh_batch(model, num_groups=3, seed=0, shared=0, longer=0)` makes a batch that the model has sampled."""
    return batch_of


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., Decoder]:
    """`tiny`, for what is made once for many tests."""
    return make_model


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TrainingBatch]:
    """`fresh_batch`, likewise."""
    return batch_of


@pytest.fixture
def plain_logprobs() -> Callable[..., list[float]]:
    """`plain_logprobs(model, ids, temperature=1.0)` by log_softmax over whole logits."""
    return logprobs_of
