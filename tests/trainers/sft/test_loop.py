"""Imitation: the loss by the plain formula, and a small model that comes to say what it was shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.envs.catalog.resolve import make_env
from agentgym.errors import ConfigError, TrainingHalted
from agentgym.model.decoder import Decoder
from agentgym.model.language_model import LanguageModel
from agentgym.model.policy import load_policy
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.model_check.small_models import save_small_model
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.sft.demonstrations import Demonstration, DemonstrationConfig, stream
from agentgym.trainers.sft.lesson import Validation
from agentgym.trainers.sft.lesson_batches import imitation_batch
from agentgym.trainers.sft.lesson_state import LessonState
from agentgym.trainers.sft.loop import ImitationConfig, ImitationStep, imitate, learn

Tiny = Callable[..., Decoder]
QUICK = OptimizerConfig(name="muon", learning_rate=1e-2, warmup_steps=1)


@pytest.fixture(scope="module")
def renderer(tokenizer_folder: Path) -> Renderer:
    return renderer_for(tokenizer_folder)


def measured(model: LanguageModel, rows: Sequence[Demonstration]) -> StepStats:
    """The statistics of rows under the weights of a model."""
    state = ImitationConfig().begin(model)
    stats = state.learner.measure(imitation_batch(rows))
    state.close()
    return stats


def test_the_loss_counts_the_imitated_tokens_alone(tiny: Tiny, plain_logprobs: Callable[..., list[float]]) -> None:
    model = tiny()
    first = Demonstration((3, 1, 4, 1, 5), (False, False, True, False, True), success=True)
    second = Demonstration((2, 7, 1), (False, True, True), success=True)
    one, two = plain_logprobs(model, first.ids), plain_logprobs(model, second.ids)
    wanted = -(one[1] + one[3] + two[0] + two[1]) / 4
    assert measured(model, [first, second]).loss == pytest.approx(wanted, rel=1e-5)


def test_what_is_not_imitated_has_no_gradient(tiny: Tiny, renderer: Renderer) -> None:
    # The last id is no input of anything imitated, and no target: what it is makes no difference.
    steps: list[ImitationStep] = []
    weights = []
    for last in (8, 9):
        model = tiny(vocab_size=renderer.vocab_size, tied=False)
        shown = Demonstration((3, 1, 4, last), (False, False, True, False), success=True)
        config = ImitationConfig(steps=1, batch_size=1, optimizer=QUICK)
        learn(model, renderer, iter([shown]), config, on_step=steps.append)
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert steps[0].loss == steps[1].loss
    assert all(torch.equal(one, two) for one, two in zip(*weights, strict=True))


@pytest.mark.long
def test_the_loss_falls_and_every_step_is_told(tiny: Tiny, renderer: Renderer) -> None:
    model = tiny(vocab_size=renderer.vocab_size, window=2048)
    env = make_env("GuessNumber-v0", {"level": 1})
    config = ImitationConfig(steps=30, batch_size=4, optimizer=QUICK)
    steps: list[ImitationStep] = []
    imitate(model, renderer, [env], config, on_step=steps.append)
    assert [one.step for one in steps] == list(range(1, 31))
    assert steps[-1].loss < 0.5 * steps[0].loss
    assert all(one.success == 1.0 and 0 < one.imitated_tokens < one.tokens for one in steps)
    assert steps[-1].elapsed_s > steps[0].elapsed_s
    first = list(islice(stream([env], renderer, 0, DemonstrationConfig()), 4))
    assert steps[0].tokens == sum(len(one.ids) for one in first)


def test_validation_is_the_loss_of_rows_that_are_not_learned_after_every_pass(tiny: Tiny, renderer: Renderer) -> None:
    rows = list(islice(stream([make_env("GuessNumber-v0", {"level": 1})], renderer, 0, DemonstrationConfig()), 5))
    plain, watched = (tiny(vocab_size=renderer.vocab_size, window=2048) for _ in range(2))
    config = ImitationConfig(steps=5, batch_size=2, optimizer=QUICK)
    steps: list[ImitationStep] = []
    learn(plain, renderer, cycle(rows[:4]), config)
    learn(watched, renderer, cycle(rows[:4]), config, validation=Validation(rows[3:], 2), on_step=steps.append)
    assert torch.equal(plain.embed, watched.embed)
    assert [step.step for step in steps if step.validation_loss is not None] == [2, 4, 5]
    wanted = measured(watched, rows[3:]).loss
    assert steps[-1].validation_loss == pytest.approx(wanted, rel=1e-5)
    assert steps[-1].validation_loss < (steps[1].validation_loss or 0.0)


@pytest.mark.slow
def test_adapters_imitate_and_leave_a_model_without_adapters(tiny: Tiny, renderer: Renderer) -> None:
    model = tiny(vocab_size=renderer.vocab_size, window=2048)
    embed, qkv = model.embed.detach().clone(), model.layers[0].qkv.detach().clone()  # type: ignore[operator, union-attr]
    shown = list(islice(stream([make_env("GuessNumber-v0")], renderer, 7, DemonstrationConfig()), 4))
    config = ImitationConfig(
        steps=30,
        batch_size=4,
        optimizer=OptimizerConfig(warmup_steps=1),
        learner=LearnerConfig(lora=LoraConfig(rank=4)),
    )
    steps: list[ImitationStep] = []
    learn(model, renderer, cycle(shown), config, on_step=steps.append)
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert measured(model, shown).loss < 1.05 * steps[-1].loss, "what was learned is in the weights"
    assert torch.equal(model.embed, embed) and not torch.equal(model.layers[0].qkv, qkv)  # type: ignore[arg-type]
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    assert names == [name for name, _ in tiny().named_parameters()]


@pytest.mark.parametrize(
    ("dtype", "size", "warns"), [("bfloat16", 1e-5, True), ("bfloat16", 1.0, False), ("float32", 1e-5, False)]
)
def test_adapters_that_the_type_of_the_weights_cannot_hold_are_named_where_they_are_merged(
    dtype: str, size: float, warns: bool, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny().to(getattr(torch, dtype))
    state = LessonState(model, LearnerConfig(lora=LoraConfig(rank=4, seed=0)), QUICK, 1)
    with torch.no_grad():
        for name, own in model.named_parameters():
            if name.endswith("B_OR"):
                own.copy_(torch.randn(own.shape, generator=torch.Generator().manual_seed(1)) * size)
    state.close()
    found = [record.message for record in caplog.records if "of what its adapters learned" in record.message]
    assert len(found) == warns and all("learn in float32 (--dtype float32)" in text for text in found)


def test_a_step_reports_the_mean_loss_before_it(tiny: Tiny, renderer: Renderer) -> None:
    model, env = tiny(vocab_size=renderer.vocab_size, window=2048), make_env("GuessNumber-v0")
    shown = list(islice(stream([env], renderer, 7, DemonstrationConfig()), 3))
    wanted = measured(model, shown).loss
    steps: list[ImitationStep] = []
    imitate(model, renderer, [env], ImitationConfig(steps=1, batch_size=3), first_seed=7, on_step=steps.append)
    assert steps[0].loss == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "given", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 500, "threads": 1}, {"activation_checkpointing": True}]
)
def test_passes_of_few_tokens_or_that_recompute_learn_the_same(
    given: dict[str, Any], tiny: Tiny, renderer: Renderer
) -> None:
    rows = list(islice(stream([make_env("GuessNumber-v0")], renderer, 7, DemonstrationConfig()), 5))
    found: list[tuple[ImitationStep, torch.Tensor]] = []
    for settings in ({}, given):
        model, steps = tiny(vocab_size=renderer.vocab_size, window=2048), []
        optimizer = OptimizerConfig(name="sgd", warmup_steps=0)
        config = ImitationConfig(steps=1, batch_size=5, optimizer=optimizer, learner=LearnerConfig(**settings))
        learn(model, renderer, iter(rows), config, validation=Validation(rows, 1), on_step=steps.append)
        found.append((steps[0], model.embed.detach()))
    (plain, weights), (other, same) = found
    torch.testing.assert_close(same, weights, rtol=1e-4, atol=1e-6)
    numbers = [(step.loss, step.grad_norm, step.validation_loss) for step in (plain, other)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


def test_a_pass_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        ImitationConfig(learner=LearnerConfig(micro_batch_tokens=0))


def test_a_large_model_is_taught_gently_where_nothing_is_given(
    tiny: Tiny, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(vocab_size=renderer.vocab_size)
    small = ImitationConfig().with_optimizer(model).optimizer
    monkeypatch.setattr("agentgym.trainers.settings.optimizer.BIG", 1000)
    large = ImitationConfig().with_optimizer(model).optimizer
    assert [(one.name, one.learning_rate) for one in (small, large)] == [("muon", 2e-3), ("adamw", 2e-5)]
    short = ImitationConfig(steps=60).with_optimizer(model).optimizer
    assert (small.warmup_steps, short.warmup_steps) == (30, 6), "a tenth of the steps at most"


def test_equal_settings_give_equal_weights(tiny: Tiny, renderer: Renderer) -> None:
    found = []
    for _ in range(2):
        model = tiny(vocab_size=renderer.vocab_size, window=2048)
        demonstrations = DemonstrationConfig(mistakes=0.3)
        config = ImitationConfig(steps=2, batch_size=3, demonstrations=demonstrations, optimizer=QUICK)
        imitate(model, renderer, [make_env("GuessNumber-v0")], config, first_seed=3)
        found.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_demonstration_past_the_context_window_is_learned_up_to_there(tiny: Tiny, renderer: Renderer) -> None:
    model = tiny(vocab_size=renderer.vocab_size, window=64)
    steps: list[ImitationStep] = []
    imitate(model, renderer, [make_env("TextGame-v0")], ImitationConfig(steps=1, batch_size=2), on_step=steps.append)
    assert steps[0].tokens == 2 * 65


def test_what_on_step_raises_ends_the_training_after_a_whole_step(tiny: Tiny, renderer: Renderer) -> None:
    def stop(step: ImitationStep) -> None:
        if step.step == 2:
            raise KeyboardInterrupt

    model, other = (tiny(vocab_size=renderer.vocab_size, window=2048) for _ in range(2))
    long, short = (ImitationConfig(steps=steps, batch_size=2, optimizer=QUICK) for steps in (50, 2))
    with pytest.raises(KeyboardInterrupt):
        imitate(model, renderer, [make_env("GuessNumber-v0")], long, on_step=stop)
    imitate(other, renderer, [make_env("GuessNumber-v0")], short)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_halts_with_the_weights_untouched(tiny: Tiny, renderer: Renderer) -> None:
    model = tiny(vocab_size=renderer.vocab_size, window=2048)
    with torch.no_grad():
        model.final_norm[0] = torch.inf
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(TrainingHalted, match=r"gradient norm .* is not finite; the weights are as before"):
        imitate(model, renderer, [make_env("GuessNumber-v0")], ImitationConfig(steps=3))
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def test_a_tokenizer_of_another_model_is_refused(tiny: Tiny, renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="belongs to the model"):
        imitate(tiny(vocab_size=50), renderer, [make_env("GuessNumber-v0")], ImitationConfig())


@pytest.mark.parametrize("name", ["steps", "batch_size"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ImitationConfig(**{name: 0})


@pytest.mark.long
def test_a_mixture_of_experts_also_learns_to_balance_them_as_its_configuration_says(tmp_path: Path) -> None:
    save_small_model("qwen3_moe", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(settings | {"output_router_logits": True, "router_aux_loss_coef": 0.5})
    )
    shown = [
        Demonstration((3, 1, 4, 1, 5), (False, False, True, False, True), success=True),
        Demonstration((2, 7, 1), (False, False, True), success=True),
    ]
    stats = measured(load_policy(tmp_path), shown)
    assert stats.router is not None
    balance = 0.5 * stats.router.router_loss
    other = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = [other(torch.tensor([row.ids[:-1]]), output_router_logits=True).aux_loss for row in shown]
    assert balance == pytest.approx(0.5 * float((2 * found[0] + found[1]).detach()) / 3, rel=1e-5)
    steps: list[ImitationStep] = []
    renderer: Any = SimpleNamespace(vocab_size=8)
    learn(load_policy(tmp_path), renderer, iter(shown), ImitationConfig(steps=1, batch_size=2), on_step=steps.append)
    assert steps[0].loss == pytest.approx(stats.loss - balance, rel=1e-5), "the reported loss is that of the tokens"
