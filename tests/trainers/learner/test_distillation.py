"""Distillation: the divergence from a teacher over the whole vocabulary, and at the sampled tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.model.decoder import Decoder
from agentgym.model.model_folder import save_model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner, LearnerConfig, StepStats
from agentgym.trainers.learner.reference import FinalStates, check_teacher, generalized_jsd, whole_divergence
from agentgym.trainers.resolve import inapplicable_symptoms, resolve_config
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

Tiny = Callable[..., Decoder]
Fresh = Callable[..., TrainingBatch]
Train = Callable[..., Any]


def plain_jsd(student_MV: Tensor, teacher_MV: Tensor, beta: float) -> Tensor:
    """The loss of GKD as its paper and TRL write it, from probabilities."""
    student_MV, teacher_MV = student_MV.log_softmax(-1), teacher_MV.log_softmax(-1)
    if beta in (0.0, 1.0):
        towards, away = (student_MV, teacher_MV) if beta == 0.0 else (teacher_MV, student_MV)
        return F.kl_div(towards, away, reduction="none", log_target=True).sum(-1)
    mixture_MV = (beta * teacher_MV.exp() + (1 - beta) * student_MV.exp()).log()
    of_teacher = F.kl_div(mixture_MV, teacher_MV, reduction="none", log_target=True).sum(-1)
    of_student = F.kl_div(mixture_MV, student_MV, reduction="none", log_target=True).sum(-1)
    return beta * of_teacher + (1 - beta) * of_student


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_divergence_is_that_of_its_paper_and_zero_for_equal_models(beta: float) -> None:
    student, teacher = torch.randn(2, 50, 17, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(generalized_jsd(student, teacher, beta), plain_jsd(student, teacher, beta))
    assert generalized_jsd(student, student + 3.0, beta).abs().max() < 1e-12
    assert (generalized_jsd(student, teacher, beta) > 0).all()


def test_small_weights_have_the_limits_for_their_slope() -> None:
    student, teacher = torch.randn(2, 8, 11, generator=torch.Generator().manual_seed(1)).double()
    for beta, end in ((1e-5, 0.0), (1 - 1e-5, 1.0)):
        share = beta if end == 0.0 else 1 - beta
        torch.testing.assert_close(
            generalized_jsd(student, teacher, beta) / share,
            generalized_jsd(student, teacher, end),
            rtol=1e-3,
            atol=1e-4,
        )


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden_ME, head_VE = torch.randn(13, 6, generator=generator), torch.randn(29, 6, generator=generator)
    teacher_MF, teacher_VF = torch.randn(13, 4, generator=generator), torch.randn(29, 4, generator=generator)
    results = []
    for size in (4_000_000, 29 * 4):
        monkeypatch.setattr("agentgym.trainers.learner.reference.CHUNK_LOGITS", size)
        own, head = hidden_ME.clone().requires_grad_(), head_VE.clone().requires_grad_()
        states = FinalStates(own, head, 30.0), FinalStates(teacher_MF, teacher_VF, None)
        value_M = whole_divergence(*states, 0.5, 0.7)
        results.append((value_M, *torch.autograd.grad(value_M.sum(), (own, head))))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)


def saved(model: Decoder, folder: Path) -> str:
    save_model_folder(model, folder)
    return str(folder)


def update(model: Decoder, batch: TrainingBatch, kl: KLConfig, **settings: Any) -> tuple[StepStats, list[Tensor]]:
    """The statistics of a step, and its gradient."""
    step = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, max_grad_norm=1e9)
    learner = Learner(model, LearnerConfig(kl=kl, threads=1, **settings), step, total_steps=10)
    gradients: list[Tensor] = []
    take = learner.optimizer.step

    def observed() -> float:
        gradients.extend(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)
        return take()

    learner.optimizer.step = observed  # type: ignore[method-assign]
    stats = learner.update(batch)
    learner.close()
    return stats, gradients


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("micro_batch_tokens", [8, 4096])
def test_a_step_from_a_teacher_is_the_plain_gradient(
    tiny: Tiny, fresh_batch: Fresh, tmp_path: Path, beta: float, micro_batch_tokens: int
) -> None:
    model, teacher = tiny(), tiny(seed=5)
    batch = fresh_batch(model)
    batch = replace(batch, advantage_N=torch.zeros_like(batch.advantage_N))
    layout = PackedLayout(batch.seqlens)
    logits_NV = model.logits(model.hidden_states(batch.ids_N, layout))
    with torch.no_grad():
        teacher_NV = teacher.logits(teacher.hidden_states(batch.ids_N, PackedLayout(batch.seqlens)))
    divergence_N = plain_jsd(logits_NV, teacher_NV, beta)
    loss = 2.0 * (batch.weight_N * divergence_N)[batch.mask_N].sum()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    kl = KLConfig(reference=saved(teacher, tmp_path / "teacher"), coefficient=2.0, penalty="jsd", beta=beta)
    stats, gradients = update(model, batch, kl, micro_batch_tokens=micro_batch_tokens)
    assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert stats.kl == pytest.approx(float(divergence_N[batch.mask_N].detach().mean()), rel=1e-5)
    for left, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-7)


def test_at_sampled_tokens_a_teacher_takes_the_place_of_the_first_weights(
    tiny: Tiny, fresh_batch: Fresh, tmp_path: Path
) -> None:
    model, teacher = tiny(), tiny(seed=5)
    batch = fresh_batch(model)
    kl = KLConfig(reference=saved(teacher, tmp_path / "teacher"), coefficient=1.0, penalty="k1_st")
    logp_N, teacher_N = (
        each.logits(each.hidden_states(batch.ids_N, PackedLayout(batch.seqlens)))
        .log_softmax(-1)
        .gather(1, batch.target_N[:, None])[:, 0]
        .detach()
        for each in (model, teacher)
    )
    stats, _ = update(model, batch, kl)
    assert stats.kl == pytest.approx(float((logp_N - teacher_N)[batch.mask_N].mean()), rel=1e-4)


def test_adapters_learn_from_a_teacher_and_from_their_base(tiny: Tiny, fresh_batch: Fresh, tmp_path: Path) -> None:
    model, teacher = tiny(), tiny(seed=5)
    batch = fresh_batch(model)
    lora = LoraConfig(rank=4, seed=0)
    kl = KLConfig(reference=saved(teacher, tmp_path / "teacher"), coefficient=1.0, penalty="jsd")
    first, _ = update(tiny(), batch, kl, lora=lora)
    assert first.kl > 0.01
    own, _ = update(tiny(), batch, KLConfig(coefficient=1.0, penalty="jsd"), lora=lora)
    assert own.kl == pytest.approx(0.0, abs=1e-6)  # the base is the model that it begins as


@pytest.mark.parametrize("penalty", ["jsd", "k2"])
@pytest.mark.parametrize(("num_own", "num_theirs"), [(44, 40), (40, 44)])
def test_padding_of_the_embedding_is_ignored(
    penalty: str, num_own: int, num_theirs: int, tiny: Tiny, fresh_batch: Fresh, tmp_path: Path
) -> None:
    model, teacher, batch = tiny(vocab_size=num_own), tiny(vocab_size=num_theirs, seed=5), fresh_batch(tiny())
    with torch.no_grad():
        for own in (model, teacher):  # padding that would matter
            own.embed[40:] *= 3
    kl = KLConfig(reference=saved(teacher, tmp_path / "teacher"), coefficient=1.0, penalty=penalty)  # type: ignore[arg-type]
    stats, _ = update(model, batch, kl)
    layout = PackedLayout(batch.seqlens, ids_N=batch.ids_N)
    fresh = tiny(vocab_size=num_own)
    with torch.no_grad():
        fresh.embed[40:] *= 3
        logits = [own.logits(own.hidden_states(batch.ids_N, layout))[batch.mask_N] for own in (fresh, teacher)]
    if penalty == "jsd":
        expected = generalized_jsd(logits[0][:, :40], logits[1][:, :40], kl.beta).mean()
    else:
        target_M1 = batch.target_N[batch.mask_N][:, None]
        own_M, their_M = (each.log_softmax(-1).gather(1, target_M1)[:, 0] for each in (logits[0], logits[1][:, :40]))
        expected = ((own_M - their_M) ** 2 / 2).mean()
    assert stats.kl == pytest.approx(float(expected), rel=1e-4)


def changed_tokenizer(change: str, folder: Path) -> Path:
    """Copies the embedded model's folder with another tokenizer."""
    shutil.copytree(embedded_folder(), folder, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    names = sorted(vocab, key=vocab.get)
    if change == "ids":
        vocab[names[300]], vocab[names[301]] = vocab[names[301]], vocab[names[300]]
    elif change == "merges":
        tokenizer["model"]["merges"].pop()
    elif change == "normalizer":
        tokenizer["normalizer"] = {"type": "Lowercase"}
    elif change == "added token":
        tokenizer["added_tokens"][0]["content"] = "<|other|>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("change", ["ids", "merges", "normalizer", "added token"])
def test_a_teacher_with_another_tokenizer_of_the_same_size_is_refused(change: str, tmp_path: Path) -> None:
    teacher = changed_tokenizer(change, tmp_path / "teacher")
    options = ["--learner.kl.reference", str(teacher), "--learner.kl.coefficient", "1", "--steps", "1"]
    with pytest.raises(ConfigError, match="is not that of the trained model"):
        check_teacher(str(teacher), embedded_folder())
    words = ["train", "--env", "TextGame-v0", "--algo", "distill", *options, "--output", str(tmp_path / "run")]
    assert main(words) == 2
    assert not (tmp_path / "run").exists()


def test_a_teacher_with_the_same_tokenizer_is_accepted_despite_other_settings(tmp_path: Path) -> None:
    teacher = changed_tokenizer("nothing", tmp_path / "teacher")
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    further = {**tokenizer["added_tokens"][0], "id": 1984, "content": "<|further|>"}
    tokenizer["added_tokens"].append(further)
    tokenizer["padding"], tokenizer["post_processor"] = None, None
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    check_teacher(str(teacher), embedded_folder())
    check_teacher(None, embedded_folder())


@pytest.mark.parametrize("unset", [{"continuing_subword_prefix": ""}, {"dropout": 0.0}])
def test_a_teachers_tokenizer_may_spell_an_unset_setting_otherwise(unset: dict[str, object], tmp_path: Path) -> None:
    teacher = changed_tokenizer("nothing", tmp_path / "teacher")
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    tokenizer["model"] |= unset
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_teacher(str(teacher), embedded_folder())


@pytest.mark.parametrize("change", ["trim_offsets", "sequence of one", "empty sequence"])
def test_a_teachers_tokenizer_may_spell_its_steps_otherwise(change: str, tmp_path: Path) -> None:
    teacher = changed_tokenizer("nothing", tmp_path / "teacher")
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    steps = tokenizer["pre_tokenizer"]
    byte_level = steps["pretokenizers"][-1]
    assert byte_level["type"] == "ByteLevel" and tokenizer["normalizer"] is None
    if change == "trim_offsets":
        byte_level["trim_offsets"] = not byte_level["trim_offsets"]
    elif change == "sequence of one":
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [steps]}
    else:
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": []}
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_teacher(str(teacher), embedded_folder())
    byte_level["add_prefix_space"] = not byte_level["add_prefix_space"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="another pre-tokenizer"):
        check_teacher(str(teacher), embedded_folder())


def test_a_teacher_whose_row_for_a_token_of_the_model_is_padding_is_refused(tmp_path: Path) -> None:
    student = changed_tokenizer("nothing", tmp_path / "student")
    tokenizer = json.loads((student / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 1984, "content": "<|further|>"})
    (student / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"rows in its embedding, none for .* token '<\|further\|>'"):
        check_teacher(str(embedded_folder()), student)


def test_a_teacher_without_a_row_for_a_token_of_the_model_is_refused(tmp_path: Path) -> None:
    teacher = changed_tokenizer("nothing", tmp_path / "teacher")
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "vocab_size": 1974}))
    with pytest.raises(ConfigError, match=r"has 1974 rows in its embedding, none for the trained model's token"):
        check_teacher(str(teacher), embedded_folder())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 1.5, "coefficient": 1.0}, r"kl.beta is in \[0, 1\]"),
        ({"penalty": "jsd", "place": "reward", "coefficient": 1.0}, "leave kl.place at loss"),
        ({"reference": "x"}, "is compared with the policy by kl.coefficient, and that is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KLConfig(**settings)


def test_without_a_teacher_nothing_would_be_learned() -> None:
    with pytest.raises(ConfigError, match="so something else has to teach"):
        resolve_config(TrainConfig(env="TextGame-v0", algo="distill"))
    kl = KLConfig(reference="x", coefficient=1.0, penalty="jsd")
    config = resolve_config(TrainConfig(env="TextGame-v0", algo="distill", learner=LearnerConfig(kl=kl)))
    assert inapplicable_symptoms(config) == ("dead_groups", "solved", "kl_exploded")
    assert inapplicable_symptoms(resolve_config(TrainConfig(env="TextGame-v0"))) == ()


@pytest.mark.long
def test_a_run_from_a_teacher_verifies_and_resumes_to_the_bit(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(embedded_folder(), teacher)
    learner = replace(small_run.learner, kl=KLConfig(reference=str(teacher), coefficient=1.0, penalty="jsd"))
    config = replace(
        small_run,
        algo="distill",
        learner=learner,
        tasks=2,
        group_size=2,
        steps=3,
        eval=HeldOutConfig(episodes=0),
    )
    config = replace(config, checkpoint=replace(config.checkpoint, every=1))
    run = tmp_path / "run"
    train(config, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-5)  # the teacher is what the run begins with
    assert verify_run(run).ok
    assert main(["verify", str(run), "--deep"]) == 0
    whole = (run / "episodes.jsonl.zst").read_bytes()
    for step in (2, 3):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    train(config, run, resume=True)
    assert (run / "episodes.jsonl.zst").read_bytes() == whole
