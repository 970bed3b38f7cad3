"""The walk of one token: from an environment's text into the weights, and out of the next version of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import agentgym.chat_templates
from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.engines.local.engine import LocalEngine
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.packed_layout import PackedLayout
from agentgym.rollout import Limits, RolloutLoop, Sampler
from agentgym.trainers.batch.batch import build_batch
from agentgym.trainers.batch.credits import credit_groups
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trajectory import Group, Row, Source
from agentgym.types import Message, Task

MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
LIMITS = Limits(turn_tokens=6, cut_reply="answer", context_window=400)
TASK = Task("Parity-v0", 11)


class Parity(TextEnv):
    """Two turns; rewards replies of even length, which an untrained model gives about half of the time."""

    system_prompt = "Say something even."
    runs_inline = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return f"Task {seed}.", {}

    def step(self, action: str) -> StepResult:
        return f"You said {len(action)} letters.", float(len(action) % 2 == 0), self.turns == 2, False, {}


@dataclass
class Run:
    """What one step left behind."""

    renderer: Renderer
    model: Decoder
    group: Group
    scores_before: list[torch.Tensor]
    """The model's logprobs `[T - 1]` of each member's row, before the update."""
    later: Group


def make_renderer() -> Renderer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    template = (Path(agentgym.chat_templates.__file__).parent / "embedded.jinja").read_text(encoding="utf-8")
    return renderer_for(ChatTokenizer(backend, template, special_tokens={"eos_token": "<|im_end|>"}))


def make_model(renderer: Renderer) -> Decoder:
    shape = {"width": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_width": 16, "ffn_width": 64}
    config = DecoderConfig(family="qwen3", vocab_size=renderer.vocab_size, context_window=512, qk_norm=True, **shape)
    return Decoder(config).initialize(0)


def logprobs_of(model: Decoder, row: Row) -> torch.Tensor:
    """The logprob of each id but the first, by the textbook: one forward pass over the row and a full softmax."""
    ids = torch.tensor(row.ids)
    with torch.no_grad():
        logits = model.logits(model.hidden_states(ids, PackedLayout([len(ids)])))
    return torch.log_softmax(logits.float(), -1)[:-1].gather(1, ids[1:, None])[:, 0]


@asynccontextmanager
async def engine_of(model: Decoder) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(model)
    try:
        yield engine
    finally:
        await engine.close()


async def one_step() -> Run:
    renderer = make_renderer()
    model = make_model(renderer)
    async with engine_of(model) as engine:
        sampler = Sampler(RolloutLoop(engine, renderer, LIMITS), lambda task: Parity())
        (group,) = await sampler.sample([TASK], 8, step=1)
        before = [logprobs_of(model, trajectory.rows[0]) for trajectory in group.trajectories]
        batch = build_batch([group], credit_groups([group], "grpo"), aggregation="token-mean")
        learner = Learner(model, LearnerConfig(threads=1), OptimizerConfig(learning_rate=1e-2), total_steps=1)
        await engine.pause()
        stats = learner.update(batch)
        await engine.update_weights({}, 1)
        await engine.resume()
        learner.close()
        (later,) = await sampler.sample([TASK], 2, step=2)
        sampler.close()
    assert stats.mismatch_max < 1e-4
    assert stats.grad_norm > 0
    return Run(renderer, model, group, before, later)


@pytest.fixture(scope="module")
def run() -> Run:
    return asyncio.run(one_step())


def test_the_environments_text_is_the_prompt_and_is_not_trained(run: Run) -> None:
    row = run.group.trajectories[0].rows[0]
    prompt = row.spans[0]
    expected = run.renderer.render([Message("system", "Say something even."), Message("user", "Task 11.")])
    assert (list(prompt.ids), prompt.source) == (expected, Source.PROMPT)
    assert not row.mask[: len(expected)].any()


def test_what_the_engine_sampled_is_trained_and_what_answered_it_is_not(run: Run) -> None:
    for trajectory in run.group.trajectories:
        (row,) = trajectory.rows
        assert [span.source for span in row.spans] == [Source.PROMPT, Source.POLICY, Source.ENV, Source.POLICY]
        first = len(row.spans[0].ids) + len(row.spans[1].ids)
        answer = Message("user", trajectory.turns[0].observation)
        assert list(row.spans[2].ids) == run.renderer.extend(row.ids[:first].tolist(), [answer])
        assert row.mask.sum() == len(row.spans[1].ids) + len(row.spans[3].ids)


def test_the_engines_logprobs_are_the_models_own(run: Run) -> None:
    for trajectory, scores in zip(run.group.trajectories, run.scores_before, strict=True):
        (row,) = trajectory.rows
        sampled = torch.tensor(row.mask)[1:]
        assert torch.allclose(torch.tensor(row.logprobs)[1:][sampled], scores[sampled], atol=1e-5)


def test_each_token_meets_its_own_advantage_logprob_and_version_in_the_batch(run: Run) -> None:
    (credit,) = credit_groups([run.group], "grpo")
    assert not credit.dead, "the case needs rewards that differ"
    batch = build_batch([run.group], [credit], aggregation="token-mean")
    start = 0
    for member, trajectory in enumerate(run.group.trajectories):
        (row,) = trajectory.rows
        for place in range(1, len(row)):
            entry = start + place - 1
            assert batch.ids_N[entry] == row.ids[place - 1]
            assert batch.target_N[entry] == row.ids[place]
            assert bool(batch.mask_N[entry]) == bool(row.mask[place])
            assert batch.policy_version_N[entry] == (0 if row.mask[place] else -1)
            assert batch.advantage_N[entry] == (pytest.approx(credit.means[member]) if row.mask[place] else 0)
            assert batch.old_logp_N[entry] == pytest.approx(row.logprobs[place])
        start += len(row) - 1
    assert batch.weight_N.sum().item() == pytest.approx(1.0)


def test_the_step_makes_good_replies_likelier_than_bad_ones(run: Run) -> None:
    advantages = torch.tensor(credit_groups([run.group], "grpo")[0].means)
    gains = []
    for trajectory, before in zip(run.group.trajectories, run.scores_before, strict=True):
        (row,) = trajectory.rows
        gains.append((logprobs_of(run.model, row) - before)[torch.tensor(row.mask)[1:]].sum())
    assert float((advantages * torch.stack(gains)).sum()) > 0


def test_the_next_reply_bears_the_new_version_and_comes_from_the_new_weights(run: Run) -> None:
    for trajectory in run.later.trajectories:
        (row,) = trajectory.rows
        sampled = torch.tensor(row.mask)[1:]
        assert set(row.policy_versions[row.mask].tolist()) == {1}
        assert torch.allclose(torch.tensor(row.logprobs)[1:][sampled], logprobs_of(run.model, row)[sampled], atol=1e-5)
