"""Lessons: the loss by the plain formula, and a small model that comes to say what it was shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.envs.catalog.resolve import make_env
from agentgym.errors import ConfigError, TrainingHalted
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.model.policy import load_policy
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.lessons.batches import imitation_batch
from agentgym.trainers.lessons.config import SftConfig
from agentgym.trainers.lessons.demonstrations import Demonstration, DemonstrationConfig, stream
from agentgym.trainers.lessons.lesson import Lesson, open_lesson
from agentgym.trainers.loop.open_parts import LocalWeights
from agentgym.trainers.model_check.small_models import save_small_model
from agentgym.trainers.parts.engine import IdleEngine
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

Tiny = Callable[..., Decoder]
Learn = Callable[..., list[StepStats]]
IMITATING = LearnerConfig(loss="reinforce")
QUICK = OptimizerConfig(name="muon", learning_rate=1e-2, warmup_steps=1)


@pytest.fixture(scope="module")
def renderer(tokenizer_folder: Path) -> TemplateRenderer:
    return renderer_for(tokenizer_folder)


def guesses(renderer: TemplateRenderer, number: int, seed: int = 0) -> list[Demonstration]:
    """Demonstrations of GuessNumber-v0."""
    return list(islice(stream([make_env("GuessNumber-v0")], renderer, seed, DemonstrationConfig()), number))


def measure(model: LanguageModel, rows: Sequence[Demonstration]) -> StepStats:
    """Returns the statistics of rows under the weights of a model."""
    learner = Learner(model, IMITATING, QUICK, total_steps=1)
    stats = learner.measure(imitation_batch(rows))
    learner.close()
    return stats


def test_the_loss_counts_the_imitated_tokens_alone(tiny: Tiny, plain_logprobs: Callable[..., list[float]]) -> None:
    model = tiny()
    first = Demonstration((3, 1, 4, 1, 5), (False, False, True, False, True), success=True)
    second = Demonstration((2, 7, 1), (False, True, True), success=True)
    first_logp, second_logp = plain_logprobs(model, first.ids), plain_logprobs(model, second.ids)
    loss = -(first_logp[1] + first_logp[3] + second_logp[0] + second_logp[1]) / 4
    assert measure(model, [first, second]).loss == pytest.approx(loss, rel=1e-5)


def test_what_is_not_imitated_has_no_gradient(tiny: Tiny, learn: Learn) -> None:
    # The last id is no input of anything imitated, and no target: what it is makes no difference.
    losses, weights = [], []
    for last in (8, 9):
        model = tiny(tied=False)
        row = Demonstration((3, 1, 4, last), (False, False, True, False), success=True)
        losses.append(learn(model, [imitation_batch([row])], IMITATING, QUICK)[0].loss)
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert losses[0] == losses[1]
    assert all(torch.equal(left, right) for left, right in zip(*weights, strict=True))


@pytest.mark.long
def test_the_loss_falls(tiny: Tiny, renderer: TemplateRenderer, learn: Learn) -> None:
    model, rows = tiny(vocab_size=renderer.vocab_size, window=2048), guesses(renderer, 120)
    batches = [imitation_batch(rows[start : start + 4]) for start in range(0, 120, 4)]
    before = measure(model, rows[:4]).loss
    steps = learn(model, batches, IMITATING, QUICK)
    assert steps[0].loss == pytest.approx(before, rel=1e-5)
    assert steps[-1].loss < 0.5 * before


@pytest.mark.slow
def test_adapters_imitate_and_leave_a_model_without_adapters(
    tiny: Tiny, renderer: TemplateRenderer, learn: Learn
) -> None:
    model, rows = tiny(vocab_size=renderer.vocab_size, window=2048), guesses(renderer, 4, 7)
    embed, qkv = model.embed.detach().clone(), model.layers[0].qkv.detach().clone()  # type: ignore[operator]
    config = replace(IMITATING, lora=LoraConfig(rank=4))
    optimizer = OptimizerConfig(name="muon", learning_rate=2e-3, warmup_steps=1)
    steps = learn(model, [imitation_batch(rows)] * 30, config, optimizer)
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert measure(model, rows).loss < 1.05 * steps[-1].loss, "what was learned is in the weights"
    assert torch.equal(model.embed, embed) and not torch.equal(model.layers[0].qkv, qkv)  # type: ignore[arg-type]
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names == [name for name, _ in tiny().named_parameters()]


@pytest.mark.parametrize(
    ("dtype", "size", "warns"), [("bfloat16", 1e-5, True), ("bfloat16", 1.0, False), ("float32", 1e-5, False)]
)
def test_adapters_lost_to_the_weights_type_are_named_when_they_are_merged(
    dtype: str, size: float, warns: bool, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny().to(getattr(torch, dtype))
    learner = Learner(model, replace(IMITATING, lora=LoraConfig(rank=4, seed=0)), QUICK, total_steps=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("B_OR"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * size)
    LocalWeights(IdleEngine(model), model, learner).copy()
    learner.close()
    warnings = [record.message for record in caplog.records if "of what its adapters learned" in record.message]
    assert len(warnings) == warns and all("learn in float32 (--dtype float32)" in text for text in warnings)


@pytest.mark.parametrize(
    "more", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 500, "threads": 1}, {"activation_checkpointing": True}]
)
def test_passes_of_few_tokens_or_that_recompute_learn_the_same(
    more: dict[str, Any], tiny: Tiny, renderer: TemplateRenderer, learn: Learn
) -> None:
    rows = guesses(renderer, 5, 7)
    learned: list[tuple[StepStats, torch.Tensor]] = []
    for settings in ({}, more):
        model = tiny(vocab_size=renderer.vocab_size, window=2048)
        optimizer = OptimizerConfig(name="sgd", learning_rate=2e-3, warmup_steps=0)
        steps = learn(model, [imitation_batch(rows)] * 2, replace(IMITATING, **settings), optimizer)
        learned.append((steps[-1], model.embed.detach()))
    (plain, weights), (varied, same) = learned
    torch.testing.assert_close(same, weights, rtol=1e-4, atol=1e-6)
    assert (plain.loss, plain.grad_norm) == pytest.approx((varied.loss, varied.grad_norm), rel=1e-4)


def test_a_large_model_is_taught_gently_where_nothing_is_given() -> None:
    config = SftConfig(env="GuessNumber-v0", steps=500)
    small, large = config.optimizer_for(1_000_000), config.optimizer_for(8_000_000_000)
    assert [(optimizer.name, optimizer.learning_rate) for optimizer in (small, large)] == [
        ("muon", 2e-3),
        ("adamw", 2e-5),
    ]
    short = replace(config, steps=60).optimizer_for(1_000_000)
    assert (small.warmup_steps, short.warmup_steps) == (30, 6), "a tenth of the steps at most"


def test_steps_are_those_of_the_passes_unless_they_are_given() -> None:
    rows = SftConfig(conversations=("talks.jsonl",), batch_size=4)
    assert [rows.num_steps(10), replace(rows, epochs=1).num_steps(10), replace(rows, steps=7).num_steps(10)] == [
        8,
        3,
        7,
    ]
    assert SftConfig(env="GuessNumber-v0").num_steps(0) == 400


def test_validation_is_measured_after_every_pass_and_the_last_step() -> None:
    rows = [Demonstration((3, 1, 4), (False, True, True))]
    lesson: Lesson[Demonstration] = Lesson(
        items_after=lambda number: iter(rows * 9),
        to_batch=imitation_batch,
        summarize=lambda rows: {},
        batch_size=2,
        num_items=4,
        validation=imitation_batch(rows),
    )
    assert [step for step in range(1, 6) if lesson.measures_after(step, 5)] == [2, 4, 5]


def test_a_demonstration_past_the_context_window_is_learned_up_to_there(tiny: Tiny, renderer: TemplateRenderer) -> None:
    first = guesses(renderer, 1)[0].mask.index(True)
    model = tiny(vocab_size=renderer.vocab_size, window=first + 9)
    lesson, _ = open_lesson(SftConfig(env="GuessNumber-v0", batch_size=2), renderer, model)
    rows = lesson.take(1)
    assert lesson.summarize(rows)["tokens"] == 2 * (first + 10)
    assert any("beyond the window: " in line for line in lesson.report)
    lesson.close()
    with pytest.raises(ConfigError, match="first prompt of GuessNumber-v0 fills the model's window of 64 tokens"):
        open_lesson(SftConfig(env="GuessNumber-v0"), renderer, tiny(vocab_size=renderer.vocab_size, window=64))


def test_demonstrations_are_measured_by_held_out_tasks_and_rows_of_files_by_none() -> None:
    assert SftConfig(env="GuessNumber-v0").eval.episodes == 100
    assert SftConfig(env="GuessNumber-v0", eval=HeldOutConfig(episodes=0)).eval.episodes == 0
    assert SftConfig(conversations=("talks.jsonl",)).eval.episodes == 0
    mix = {"GuessNumber-v0": 1.0}
    assert SftConfig(conversations=("talks.jsonl",), eval=HeldOutConfig(episodes=3, mix=mix)).eval.episodes == 3
    with pytest.raises(ConfigError, match="none is named"):
        SftConfig(conversations=("talks.jsonl",), eval=HeldOutConfig(episodes=3))


def test_a_gradient_that_is_not_finite_halts_with_the_weights_untouched(
    tiny: Tiny, renderer: TemplateRenderer, learn: Learn
) -> None:
    model = tiny(vocab_size=renderer.vocab_size, window=2048)
    with torch.no_grad():
        model.final_norm[0] = torch.inf
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(TrainingHalted, match=r"gradient norm .* is not finite; the weights are as before"):
        learn(model, [imitation_batch(guesses(renderer, 2))], IMITATING, QUICK)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_tokenizer_of_another_model_is_refused(tiny: Tiny, renderer: TemplateRenderer) -> None:
    with pytest.raises(ConfigError, match="belongs to the model"):
        open_lesson(SftConfig(env="GuessNumber-v0"), renderer, tiny(vocab_size=50))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": -1}, "steps must be at least 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"group_size": 2}, "group_size is for runs that play episodes"),
        ({"algo": "grpo"}, "algo is for runs that play episodes"),
        ({"learner": LearnerConfig(minibatches=2)}, "learner.minibatches is for runs that play episodes"),
        ({"learner": LearnerConfig(loss="gspo")}, "learner.loss is that of the command"),
    ],
)
def test_settings_that_a_lesson_has_no_use_for_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SftConfig(env="GuessNumber-v0", **settings)


@pytest.mark.long
def test_a_mixture_of_experts_learns_its_configured_balance_loss(tmp_path: Path) -> None:
    save_small_model("qwen3_moe", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(settings | {"output_router_logits": True, "router_aux_loss_coef": 0.5})
    )
    rows = [
        Demonstration((3, 1, 4, 1, 5), (False, False, True, False, True), success=True),
        Demonstration((2, 7, 1), (False, False, True), success=True),
    ]
    stats = measure(load_policy(tmp_path), rows)
    assert stats.router is not None
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    losses = [theirs(torch.tensor([row.ids[:-1]]), output_router_logits=True).aux_loss for row in rows]
    balance = float((2 * losses[0] + losses[1]).detach()) / 3
    assert stats.router.router_loss == pytest.approx(balance, rel=1e-5)
