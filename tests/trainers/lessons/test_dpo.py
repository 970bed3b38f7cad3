"""Direct preference optimization: the loss, its gradient, the pairs, and the command."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agentgym.chat_templates import renderer_for
from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.envs.base.seeds import EVAL_SEED_START
from agentgym.errors import ConfigError, TrainingHalted
from agentgym.model.decoder import Decoder
from agentgym.model.model_folder import load_decoder
from agentgym.model.packed_layout import PackedLayout
from agentgym.openai_wire import REASONING
from agentgym.rollout.record.episodes_file import EpisodeWriter, read_episodes
from agentgym.trainers.algorithms.losses import PairStats, loss_with
from agentgym.trainers.checkpoints.run_folder import RunFolder
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.objective import balance_weight
from agentgym.trainers.learner.step_stats import StepStats
from agentgym.trainers.lessons.batches import pair_batch
from agentgym.trainers.lessons.config import DpoConfig
from agentgym.trainers.lessons.demonstrations import Demonstration, Pair
from agentgym.trainers.lessons.pairs import pair_of_row, pairs_of_episodes, pairs_of_files
from agentgym.trainers.parallel.balance import divide_batch
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.router import RouterConfig

Tiny = Callable[..., Decoder]
Learn = Callable[..., list[StepStats]]


def preferring(beta: float = 0.1, **settings: Any) -> LearnerConfig:
    """The settings of a learner with the loss of pairs."""
    threads = {name: settings.pop(name) for name in ("threads", "lora") if name in settings}
    return LearnerConfig(loss="preference", loss_settings={"beta": beta, **settings}, **threads)


def pairs_of(stats: StepStats) -> PairStats:
    """The statistics of the pairs of a step."""
    assert stats.pairs is not None
    return stats.pairs


def pairs_for(model: Decoder, count: int = 4) -> list[Pair]:
    """Random pairs that share their prompts, with a hole in the mask of one."""
    generator = torch.Generator().manual_seed(3)
    pairs = []
    for number in range(count):
        prompt = torch.randint(model.vocab_size, (3 + number,), generator=generator).tolist()
        rows = []
        for length in (4, 2 + number):
            reply = torch.randint(model.vocab_size, (length,), generator=generator).tolist()
            mask = [False] * len(prompt) + [True] * length
            mask[len(prompt) + 1] = length < 4
            rows.append(Demonstration(tuple(prompt + reply), tuple(mask)))
        pairs.append(Pair(*rows))
    return pairs


def plain_logprob(model: Decoder, row: Demonstration) -> Tensor:
    ids = torch.tensor(row.ids)
    logits = model.logits(model.hidden_states(ids[:-1], PackedLayout([len(ids) - 1])))
    logp = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logp[torch.tensor(row.mask[1:])].sum()


def loss_of_gains(chosen: Tensor, rejected: Tensor, **settings: Any) -> Tensor:
    """The loss of pairs of one token each."""
    gains = torch.stack([chosen, rejected], 1).reshape(-1).float()
    advantages = torch.tensor([1.0, -1.0]).repeat(len(chosen))
    numbers = torch.arange(len(chosen)).repeat_interleave(2)
    mask = torch.ones(len(gains), dtype=torch.bool)
    loss = loss_with("preference", settings)
    return loss(gains, torch.zeros_like(gains), advantages, mask, sequences=numbers).loss[::2]


def test_the_losses_are_those_of_their_papers() -> None:
    chosen, rejected = torch.tensor([1.0, -2.0, 0.3]), torch.tensor([0.5, 1.0, 0.3])
    h = chosen - rejected
    torch.testing.assert_close(loss_of_gains(chosen, rejected, beta=0.5), -(0.5 * h).sigmoid().log())
    smooth = loss_of_gains(chosen, rejected, beta=0.5, label_smoothing=0.1)
    torch.testing.assert_close(smooth, -0.9 * (0.5 * h).sigmoid().log() - 0.1 * (-0.5 * h).sigmoid().log())
    torch.testing.assert_close(loss_of_gains(chosen, rejected, beta=0.5, form="ipo"), (h - 1.0) ** 2)
    torch.testing.assert_close(loss_of_gains(chosen, rejected, beta=0.5, form="hinge"), F.relu(1 - 0.5 * h))
    assert loss_of_gains(h, h, beta=0.5)[0] == pytest.approx(math.log(2))


def test_pairs_stay_whole_in_micro_batches_and_shares(tiny: Tiny) -> None:
    batch = replace(pair_batch(pairs_for(tiny())), divides_trajectories=False)
    assert batch.portions(1) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [list(rows) for rows in divide_batch(batch, tiny(), 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.long
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_is_the_gradient_of_the_mean_over_the_pairs(tiny: Tiny, learn: Learn, loss: Any, threads: int) -> None:
    model = tiny()
    pairs = pairs_for(model)
    optimizer = OptimizerConfig(name="sgd", learning_rate=0.5, warmup_steps=0, max_grad_norm=1e9)
    first, reference = copy.deepcopy(model), copy.deepcopy(model)
    losses = []
    for _ in range(2):
        terms = []
        for pair in pairs:
            gains = []
            for row in (pair.chosen, pair.rejected):
                gain = plain_logprob(reference, row) - plain_logprob(first, row).detach()
                gains.append(gain / sum(row.mask[1:]) if loss == "ipo" else gain)
            imitation = -plain_logprob(reference, pair.chosen) / sum(pair.chosen.mask[1:])
            terms.append(loss_of_gains(gains[0][None], gains[1][None], form=loss, beta=0.3) + 0.2 * imitation)
        total = torch.stack(terms).mean()
        losses.append(float(total.detach()))
        slopes = torch.autograd.grad(total, list(reference.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(reference.parameters(), slopes, strict=True):
                parameter -= 0.5 * slope
    config = preferring(0.3, form=loss, sft_weight=0.2, threads=threads)
    steps = learn(model, [pair_batch(pairs)] * 2, config, optimizer)
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-5)
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=5e-6)


def test_the_report_is_of_the_gains_before_the_update(tiny: Tiny) -> None:
    model = tiny()
    pairs = pairs_for(model)
    batch, optimizer = pair_batch(pairs), OptimizerConfig(learning_rate=3e-2, warmup_steps=1)
    learner = Learner(model, preferring(0.5), optimizer, total_steps=12)
    first = learner.update(batch)
    for version in range(1, 11):
        learner.update(batch, version=version)
    measured, last = learner.measure(batch), learner.update(batch, version=11)
    learner.close()
    assert measured.loss == pytest.approx(last.loss) and pairs_of(measured).accuracy == 1.0
    assert (pairs_of(first).accuracy, pairs_of(first).margin) == (0.0, 0.0) and first.loss == pytest.approx(math.log(2))
    pairs_last = pairs_of(last)
    assert pairs_last.accuracy == 1.0 and pairs_last.margin > 1.0 and last.loss < 0.3
    assert pairs_last.margin == pytest.approx(pairs_last.chosen_reward - pairs_last.rejected_reward)


def test_the_loads_of_experts_are_balanced_only_where_that_is_set() -> None:
    config = DpoConfig(pairs=("pairs.jsonl",))
    assert balance_weight(config.learner, 0.5) == 0.0  # whatever the model's config.json says
    assert balance_weight(replace(config.learner, router=RouterConfig(balance=0.1)), 0.5) == 0.1
    assert balance_weight(LearnerConfig(), 0.5) == 0.5


@pytest.mark.parametrize("more", [{"micro_batch_tokens": 1}, {"activation_checkpointing": True}])
def test_passes_of_few_tokens_or_that_recompute_learn_the_same(more: dict[str, Any], tiny: Tiny, learn: Learn) -> None:
    learned: list[tuple[StepStats, torch.Tensor]] = []
    for settings in ({}, more):
        model = tiny()
        batch = pair_batch(pairs_for(model))
        optimizer = OptimizerConfig(name="sgd", learning_rate=1e-2, warmup_steps=0)
        steps = learn(model, [batch] * 2, replace(preferring(), **settings), optimizer)
        learned.append((steps[-1], model.embed.detach()))
    (plain, weights), (varied, same) = learned
    torch.testing.assert_close(same, weights, rtol=1e-4, atol=1e-6)
    numbers = [(step.loss, step.grad_norm, pairs_of(step).margin) for step in (plain, varied)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3)


def test_adapters_learn_with_their_base_as_the_reference_and_are_merged(tiny: Tiny, learn: Learn) -> None:
    model, first = tiny(), tiny()
    pairs = pairs_for(model)
    optimizer = OptimizerConfig(learning_rate=1e-1, warmup_steps=1)
    steps = learn(model, [pair_batch(pairs)] * 6, preferring(lora=LoraConfig(rank=4, seed=0)), optimizer)
    margins = [pairs_of(step).margin for step in steps]
    assert margins[0] == pytest.approx(0.0, abs=1e-6) and margins[-1] > 0.1
    with torch.no_grad():
        gained = plain_logprob(model, pairs[0].chosen) - plain_logprob(first, pairs[0].chosen)
    assert gained.abs() > 1e-3


def test_a_gradient_that_is_not_finite_halts(tiny: Tiny, learn: Learn) -> None:
    model = tiny()
    optimizer = OptimizerConfig(learning_rate=1e38, warmup_steps=0)
    with pytest.raises(TrainingHalted, match="Lower the learning rate"):
        learn(model, [pair_batch(pairs_for(model))] * 9, preferring(), optimizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
        ({"label_smoothing": 0.5}, r"label_smoothing is 0.5; it must be in \[0, 0.5\)"),
        ({"label_smoothing": 0.1, "loss": "ipo"}, "label_smoothing is 0.1; it must be 0 for the form ipo"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_config(DpoConfig(pairs=("pairs.jsonl",), **settings))


@pytest.fixture(scope="module")
def renderer() -> Any:
    return renderer_for(embedded_folder())


def said(renderer: Any, row: Demonstration) -> str:
    return str(renderer.decode([token for token, learned in zip(row.ids, row.mask, strict=True) if learned]))


def test_a_pair_is_read_from_texts_and_messages_and_only_what_differs_is_learned(renderer: Any) -> None:
    user = {"role": "user", "content": "Hello"}
    early = {"role": "assistant", "content": "hm"}
    good, bad = {"role": "assistant", "content": "go north"}, {"role": "assistant", "content": "stay"}
    forms: list[dict[str, Any]] = [
        {"prompt": "Hello", "chosen": "go north", "rejected": "stay"},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        {"prompt": "Hello", "chosen": [good], "rejected": "stay"},
    ]
    pairs = [pair_of_row(form, renderer) for form in forms]
    assert all(pair == pairs[0] for pair in pairs)
    assert said(renderer, pairs[0].chosen).startswith("go north") and said(renderer, pairs[0].rejected).startswith(
        "stay"
    )
    later = pair_of_row({"chosen": [user, early, user, good], "rejected": [user, early, user, bad]}, renderer)
    assert "hm" not in said(renderer, later.chosen) and said(renderer, later.chosen).startswith("go north")


def test_pairs_of_parquet_equal_those_of_json_and_a_null_argument_is_learned(renderer: Any, tmp_path: Path) -> None:
    def reply(arguments: dict[str, Any], **fields: Any) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call], **fields}

    user = {"role": "user", "content": "Hello"}
    rows = [{"prompt": [user], "chosen": [reply({"query": "tea"})], "rejected": [reply({"limit": 3})]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    files = [pairs_of_files([str(tmp_path / name)], renderer, 1024) for name in ("a.jsonl", "a.parquet")]
    assert files[0].pairs == files[1].pairs and "null" not in renderer.decode(files[1].pairs[0].chosen.ids)

    chosen = [{**user, "name": None}, reply({"query": "tea", "limit": None}, thinking=None)]
    pair = pair_of_row({"chosen": chosen, "rejected": [user, reply({"query": "tea"})]}, renderer)
    assert '"limit": null' in said(renderer, pair.chosen) and "null" not in said(renderer, pair.rejected)


@pytest.mark.parametrize("key", ["parameters", "args", "input"])
def test_a_pair_whose_call_has_its_arguments_under_another_key_is_refused(key: str, renderer: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find", key: {"query": "tea"}}}
    chosen = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ConfigError, match=rf'messages\[1\]\.tool_calls\[0\]: .*no "{key}"'):
        pair_of_row({"prompt": "Hello", "chosen": chosen, "rejected": "stay"}, renderer)


@pytest.mark.parametrize("name", REASONING)
def test_a_pair_learns_reasoning_under_any_usual_name(name: str, renderer: Any) -> None:
    chosen = [{"role": "assistant", "content": "go north", name: "The door."}]
    pair = pair_of_row({"prompt": "Hello", "chosen": chosen, "rejected": "stay"}, renderer)
    assert said(renderer, pair.chosen).startswith("<think>\nThe door.\n</think>")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "there is no column 'rejected'"),
        ({"prompt": "a", "chosn": "b", "rejected": "c"}, "no column 'chosen': did you mean 'chosn'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "a text or a list of messages was wanted"),
        ({"prompt": "a", "chosen": [{"role": "user", "content": "x"}], "rejected": "b"}, "holds no reply"),
    ],
)
def test_what_is_no_pair_is_named(renderer: Any, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "Hi", "chosen": "x", "rejected": "y"}\n' + json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=f"line 2: .*({message})"):
        pairs_of_files([str(path)], renderer, 1024)


def test_pairs_that_are_too_long_are_left_out_and_counted(renderer: Any, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "Hi", "chosen": "x", "rejected": "y"}, {"prompt": "x" * 3000, "chosen": "x", "rejected": "y"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair_set = pairs_of_files([str(path)], renderer, 1024)
    assert len(pair_set.pairs) == 1 and "left out: 1 longer than the window of 1024" in pair_set.report[0]
    with pytest.raises(ConfigError, match="nothing is left to learn"):
        pairs_of_files([str(path)], renderer, 4)


def test_episodes_of_a_task_make_pairs_by_their_rewards(renderer: Any, finished_run: Path) -> None:
    vocab_size = load_decoder(embedded_folder()).vocab_size
    pair_set = pairs_of_episodes([finished_run], renderer, vocab_size, 1024, per_task=2)
    rewards: dict[tuple[int, ...], float] = {}
    for record in read_episodes(finished_run):
        if len(record.trajectory.rows) == 1:
            rewards[tuple(record.trajectory.rows[0].ids.tolist())] = record.trajectory.reward or 0.0
    assert pair_set.pairs and pair_set.task is not None
    assert all(rewards[pair.chosen.ids] > rewards[pair.rejected.ids] for pair in pair_set.pairs)
    assert len(pairs_of_episodes([finished_run], renderer, vocab_size, 1024).pairs) <= len(pair_set.pairs)


@pytest.mark.parametrize(("seed", "num_held_out"), [(EVAL_SEED_START, 2), (7, 0)])
def test_pairs_of_held_out_tasks_are_named_as_by_sft(
    seed: int, num_held_out: int, renderer: Any, finished_run: Path, tmp_path: Path
) -> None:
    (first, *_) = (record.trajectory for record in read_episodes(finished_run) if len(record.trajectory.rows) == 1)
    task = replace(first.task, seed=seed)
    played = [
        replace(
            first,
            task=task,
            group="0/0",
            member=member,
            turns=(*first.turns[:-1], replace(first.turns[-1], reward=reward)),
        )
        for member, reward in enumerate((9.0, -9.0, -8.0))
    ]
    with EpisodeWriter(tmp_path) as writer:
        writer.write(played, phase="eval", step=0)
    vocab_size = load_decoder(embedded_folder()).vocab_size
    report = pairs_of_episodes([tmp_path], renderer, vocab_size, 1024).report
    line = f"{num_held_out} of the learned episodes are of held-out tasks: evaluations on those say nothing any more"
    assert report[0] == "1 pairs of 3 episodes of 1 tasks" and report[1:] == ((line,) if num_held_out else ())


def test_the_report_has_both_parts_of_the_loss(tiny: Tiny, learn: Learn) -> None:
    model = tiny()
    pairs = pairs_for(model)
    steps = learn(model, [pair_batch(pairs)] * 2, preferring(sft_weight=0.3), OptimizerConfig(learning_rate=3e-2))
    assert pairs_of(steps[0]).preference_loss == pytest.approx(math.log(2))
    for step in steps:
        assert step.loss == pytest.approx(pairs_of(step).preference_loss + 0.3 * pairs_of(step).sft_loss)
    rows = [pair.chosen for pair in pairs]
    length_R = torch.tensor([sum(row.mask[1:]) for row in rows])
    with torch.no_grad():
        nats_R = -torch.stack([plain_logprob(tiny(), row) for row in rows]) / length_R
    assert pairs_of(steps[0]).sft_loss == pytest.approx(float(nats_R.mean()))


@pytest.mark.long
def test_the_command_learns_writes_a_model_and_prints_a_summary(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "preferred"
    words = ["dpo", "--episodes", str(finished_run), "--steps", "4", "--batch-size", "2", "--output", str(output)]
    assert main([*words, "--validation", str(finished_run), "--optimizer.learning-rate", "1e-3", "--json"]) == 0
    out, stderr = capsys.readouterr()
    numbers = json.loads(out)
    assert f"validation loss {numbers['validation_loss']:.4f}" in stderr
    assert numbers["steps"] == 4 and not numbers["interrupted"] and "agentgym eval --env TextGame-v0" in stderr
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(math.log(2)) and len(lines) == 4
    assert "algo: dpo" in (output / "config.yaml").read_text()
    assert (
        main(["eval", "--env", "TextGame-v0", "--policy", str(output), "-n", "1", "--output", str(tmp_path / "e")]) == 0
    )
    capsys.readouterr()
    assert main([*words]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["dpo"]) == 2
    assert "pairs (files) or episodes (run folders); got none" in capsys.readouterr().err
    assert main(["dpo", "--pairs", str(tmp_path / "none.jsonl")]) == 2
    assert "no file" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--lora.rank", "2"]])
def test_the_command_goes_on_against_the_first_weights(
    more: list[str], finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["dpo", "--episodes", str(finished_run), "--steps", "5", "--batch-size", "2", *more]
    assert main([*words, "--optimizer.learning-rate", "1e-3", "--output", str(tmp_path / "whole")]) == 0
    write = RunFolder.write_metrics

    def die(folder: RunFolder, step: Any, head: str) -> None:
        write(folder, step, head)
        if step.step == 4:
            raise KeyError("power")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_metrics", die)
        with pytest.raises(KeyError):
            cut = ["--checkpoint.every", "1", "--optimizer.learning-rate", "1e-3", "--output", str(tmp_path / "cut")]
            main([*words, *cut])
    assert main(["dpo", "--resume", "--output", str(tmp_path / "cut")]) == 0
    whole, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == again
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "cut")]
    margins = [[json.loads(line)["margin"] for line in own] for own in lines]
    assert margins[0] == margins[1] and len(margins[0]) == 5
