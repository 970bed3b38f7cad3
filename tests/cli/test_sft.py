"""`agentgym sft`: a model folder that transformers and agentgym load, and mistakes that say what to do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.model_folder import load_decoder, published_views, save_model_folder
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trainers.checkpoints.run_folder import RunFolder
from agentgym.trainers.monitoring.metrics import StepMetrics

Command = Callable[..., Any]
ONLY_LEARN = ("--eval.episodes", 0)
QUICK = ("--steps", 3, "--batch-size", 2, "--threads", 1, *ONLY_LEARN)


@pytest.fixture
def model(tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A tiny model with the tests' tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    config = DecoderConfig(
        family="qwen3",
        vocab_size=272,
        width=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_width=8,
        ffn_width=24,
        context_window=2048,
        qk_norm=True,
    )
    save_model_folder(Decoder(config).initialize(0), folder)
    return folder


def test_it_leaves_a_model_folder_that_everything_loads(agentgym: Command, model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = agentgym(
        *("sft", "--env", "GuessNumber-v0", "--env-kwargs", "level=1", "--model", model, *QUICK),
        *("--output", "learned", "--optimizer.learning-rate", 0.01, "--json"),
    )
    assert done.code == 0, done.err
    assert done.json["steps"] == 3 and not done.json["interrupted"]
    assert done.json["loss"] < done.json["loss_first"]
    assert "agentgym eval --env GuessNumber-v0 --env-kwargs level=1 --policy learned" in done.text
    folder = tmp_path / "learned"
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), load_decoder(folder)
    assert torch.equal(theirs.get_input_embeddings().weight, ours.embed)
    assert not torch.equal(ours.embed, load_decoder(model).embed)
    assert AutoTokenizer.from_pretrained(folder).decode([0, 1])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] == pytest.approx(done.json["loss"], abs=1e-5)
    assert 0 < lines[-1]["demonstration_success"] <= 1  # the player's, and no success of the model
    assert not {"success", "sampled_tokens_per_s", "mismatch_mean"} & lines[-1].keys()
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["env_kwargs"] == {"level": 1} and settings["optimizer"]["learning_rate"] == 0.01
    played = agentgym(
        *("eval", "--env", "GuessNumber-v0", "--policy", "learned", "-n", 2, "--max-turns", 2, "--turn-tokens", 8),
        *("--output", "evaluated", "--json"),
    )
    assert played.code == 0, played.err
    assert played.json["num_episodes"] == 2


def test_help_shows_how_many_held_out_tasks_are_played(agentgym: Command) -> None:
    text = " ".join(agentgym("sft", "--help").text.split())
    assert "--eval.episodes INT Held-out tasks played before and after training" in text
    assert "0 plays none. (default: 100)" in text


def test_by_default_success_of_oracle_and_model_is_shown_before_and_after(
    agentgym: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentgym.trainers.lessons.config.NUM_HELD_OUT", 2)
    limits = ("--limits.max-turns", 2, "--limits.turn-tokens", 8)
    done = agentgym("sft", "--env", "GuessNumber-v0", "--model", model, *QUICK[:6], *limits, "--output", "out")
    assert done.code == 0, done.err
    lines = done.text.splitlines()
    assert lines[0].startswith("oracle: success 1.000 (")
    assert lines[1].startswith("with mistakes: success ") and "at 0.25 of the turns a random player moves" in lines[1]
    assert any(line.startswith("before") for line in lines) and any(line.startswith("after") for line in lines)
    assert "95% interval" in done.text and "success is 0: `agentgym docs success_stays_zero`" in done.text
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["eval"]["episodes"] == 2


def test_adapters_are_merged_into_the_model_that_is_left(agentgym: Command, model: Path, tmp_path: Path) -> None:
    lora = ("--lora.rank", 2, "--lora.target-modules", "q_proj", "down_proj", "--optimizer.learning-rate", 0.01)
    done = agentgym(
        *("sft", "--env", "GuessNumber-v0", "--env-kwargs", "level=1", "--model", model, *QUICK, *lora),
        *("--output", "learned", "--json"),
    )
    assert done.code == 0, done.err
    first, learned = (dict(published_views(load_decoder(folder))) for folder in (model, tmp_path / "learned"))
    changed = {name.split(".")[-2] for name, tensor in first.items() if not torch.equal(tensor, learned[name])}
    assert changed == {"q_proj", "down_proj"}
    moved = learned["model.layers.0.self_attn.q_proj.weight"] - first["model.layers.0.self_attn.q_proj.weight"]
    assert torch.linalg.matrix_rank(moved, rtol=1e-3) <= 2


def test_equal_seeds_give_equal_models_and_other_seeds_others(agentgym: Command, model: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        common = ("sft", "--env", "GuessNumber-v0", "--model", model, *QUICK)
        assert agentgym(*common, "--output", name, "--seed", seed).code == 0
    models = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert models["a"] == models["b"] != models["c"]


def test_without_an_output_the_folder_is_a_new_one_under_runs(agentgym: Command, model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert agentgym("sft", "--env", "GuessNumber-v0", "--model", model, "--steps", 1, *ONLY_LEARN).code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "GuessNumber-v0-sft-seed0-1",
        "GuessNumber-v0-sft-seed0-2",
    ]


def test_an_output_that_is_taken_is_left_alone(agentgym: Command, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    done = agentgym("sft", "--env", "GuessNumber-v0", "--model", model, "--output", "mine")
    assert done.code == 2 and "'mine' is taken already" in done.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--env", "GuesNumber-v0"), "did you mean 'GuessNumber-v0'"),
        (("--env", "flaky.py:Flaky"), "Flaky has no oracle policy; give it a method make_oracle(self)"),
        (("--env", "GuessNumber-v0", "--policy", "orcle"), "did you mean 'oracle'"),
        (("--env", "GuessNumber-v0", "--model", "absent"), "no model folder 'absent'"),
        (("--env", "GuessNumber-v0", "--mistakes", "2"), "between 0 and 1"),
        (("--env", "GuessNumber-v0", "--steps", "-1"), "steps must be at least 0"),
        (("--env", "GuessNumber-v0", "--batch-size", "0"), "batch_size must be at least 1"),
        (("--env", "GuessNumber-v0", "--learning-rate", "0.1"), "--optimizer.learning-rate"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_errors_explain_what_to_do_and_write_nothing(
    args: tuple[str, ...], message: str, agentgym: Command, model: Path, tmp_path: Path
) -> None:
    words = args if "--model" in args else (*args, "--model", model)
    done = agentgym("sft", *words, "--output", "out")
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "out").exists()


LATE = """
from agentgym.envs import TextEnv


class Late(TextEnv):
    max_turns = 1
    runs_inline = True
    num_steps = 0

    def reset(self, *, seed=None, options=None):
        return "Say something.", {}

    def step(self, action):
        Late.num_steps += 1
        if Late.num_steps > 37:  # 32 of them are the trial's
            raise ValueError("the machine fell apart")
        return "Done.", 1.0, True, False, {}
"""


def test_an_environment_that_fails_keeps_what_was_learned(
    agentgym: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentgym.trainers.lessons.player_trial.TRIAL_S", 600.0)
    (tmp_path / "late.py").write_text(LATE)
    words = ("sft", "--env", "late.py:Late", "--policy", "random", "--mistakes", 0, "--model", model)
    done = agentgym(*words, *QUICK, "--output", "out")
    assert done.code == 1 and len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "ValueError: the machine fell apart" in done.err
    assert "what was learned" in done.text
    load_decoder(tmp_path / "out")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_saves_what_was_learned_and_prints_it(
    number: signal.Signals, code: int, agentgym: Command, model: Path, tmp_path: Path
) -> None:
    metrics = tmp_path / "out" / "metrics.jsonl"

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not metrics.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.getsignal(number)
    done = agentgym(
        *("sft", "--env", "GuessNumber-v0", "--model", model, "--steps", 100_000, "--batch-size", 1, *ONLY_LEARN),
        *("--output", "out", "--json"),
    )
    assert signal.getsignal(number) is before
    assert done.code == code
    assert done.json["interrupted"] and 1 <= done.json["steps"] < 100_000
    message = f"interrupted after step {done.json['steps']} of 100000; what was learned is in out"
    assert f"{message}; agentgym sft --resume --output out goes on" in done.err
    assert len(metrics.read_text().splitlines()) == done.json["steps"]
    load_decoder(tmp_path / "out")


@pytest.mark.parametrize("more", [(), ("--lora.rank", 2)])
def test_a_command_that_was_killed_goes_on_to_the_same_bytes(
    more: tuple[Any, ...], agentgym: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("sft", "--env", "GuessNumber-v0", "--model", model, *QUICK, "--steps", 6, *more)
    assert agentgym(*words, "--output", "whole").code == 0
    write = RunFolder.write_metrics

    def die(folder: RunFolder, metrics: StepMetrics, head: str) -> None:
        write(folder, metrics, head)
        if metrics.step == 4:
            raise KeyError("power")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_metrics", die)
        with pytest.raises(KeyError):
            agentgym(*words, "--checkpoint.every", 1, "--output", "cut")
    refused = agentgym("sft", "--resume", "--output", "cut", "--batch-size", 3)
    assert refused.code == 2 and "batch_size: 2 there, 3 here" in refused.err
    done = agentgym("sft", "--resume", "--output", "cut", "--json")
    assert done.code == 0 and "goes on after step 3" in done.err and done.json["steps"] == 6
    whole, cut = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "cut")]
    assert [[json.loads(line)["loss"] for line in own] for own in lines] == [
        [json.loads(line)["loss"] for line in lines[0]]
    ] * 2
    longer = agentgym("sft", "--resume", "--output", "cut", "--steps", 7, "--json")
    assert longer.code == 0 and longer.json["steps"] == 7, "the checkpoint of the last step stays"


def test_settings_of_the_learner_are_read_by_their_short_names_too(
    agentgym: Command, model: Path, tmp_path: Path
) -> None:
    words = ("sft", "--env", "GuessNumber-v0", "--model", model, "--steps", 1, "--batch-size", 1, *ONLY_LEARN)
    short = ("--lora.rank", 2, "--micro-batch-tokens=500", "--activation-checkpointing", "--threads", 1)
    assert agentgym(*words, *short, "--output", "short").code == 0
    learner = yaml.safe_load((tmp_path / "short" / "config.yaml").read_text())["learner"]
    assert (learner["lora"]["rank"], learner["micro_batch_tokens"], learner["threads"]) == (2, 500, 1)
    assert learner["activation_checkpointing"] and learner["device"] == "cpu"
    old = {"env": "GuessNumber-v0", "model": str(model), "steps": 1, "batch_size": 1, "device": "cpu", "threads": 1}
    old |= {"eval": {"episodes": 0}}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old | {"lora": {"rank": 2}, "micro_batch_tokens": 500}))
    assert agentgym("sft", "--config", "old.yaml", "--activation-checkpointing", "--output", "old").code == 0
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("short", "old")]
    assert models[0] == models[1]
    refused = agentgym(*words, "--learner.epochs", 2, "--output", "refused")
    assert refused.code == 2 and "learner.epochs is for runs that play episodes: leave it out" in refused.err
    assert not (tmp_path / "refused").exists()


@pytest.mark.long
def test_held_out_tasks_are_played_between_steps_and_name_the_best_checkpoint(
    agentgym: Command, model: Path, tmp_path: Path
) -> None:
    played = ("--eval.episodes", 2, "--eval.every", 2, "--limits.max-turns", 2, "--limits.turn-tokens", 8)
    checkpoint_words = ("--checkpoint.every", 2, "--checkpoint.keep-best", "eval_success")
    words = ("sft", "--env", "GuessNumber-v0", "--model", model, "--steps", 4, *QUICK[2:6], *played, *checkpoint_words)
    done = agentgym(*words, "--output", "out", "--json")
    assert done.code == 0, done.err
    assert {"success_before", "success_after"} <= done.json.keys()
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_success" in line] == [1, 3]
    assert (tmp_path / "out" / "checkpoints" / "best").read_text().startswith("step-00000")
    phases = [(record.phase, record.step) for record in read_episodes(tmp_path / "out")]
    assert phases == [(phase, step) for phase, step in PLAYED for _ in range(2)]
    assert agentgym("verify", "out").code == 0


PLAYED = [("eval_before", 0), ("eval_during", 2), ("eval_after", 4)]


def test_trackers_get_the_numbers_of_the_steps(agentgym: Command, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Lines:\n"
        "    def begin(self, run):\n"
        "        self.lines, self.folder = [(run.step, run.project, run.config['algo'])], run.folder\n"
        "    def step(self, step, metrics): self.lines.append((step, 'loss' in metrics, 'grad_norm' in metrics))\n"
        "    def episodes(self, step, episodes): pass\n"
        "    def finish(self): (self.folder / 'lines.txt').write_text(repr(self.lines))\n"
    )
    words = ("sft", "--env", "GuessNumber-v0", "--model", model, *QUICK, "--project", "lessons")
    assert agentgym(*words, "--trackers", "mine.py:Lines", "--output", "out").code == 0
    notes = [(0, "lessons", "sft"), *((step, True, True) for step in (1, 2, 3))]
    assert (tmp_path / "out" / "lines.txt").read_text() == repr(notes)
    refused = agentgym(*words, "--trackers", "wanb", "--output", "other")
    assert refused.code == 2 and "did you mean 'wandb'" in refused.err and not (tmp_path / "other").exists()


def test_a_tokenizer_of_another_model_is_refused_before_there_is_a_folder(
    agentgym: Command, model: Path, tmp_path: Path
) -> None:
    config = replace(load_decoder(model).config, vocab_size=100)
    save_model_folder(Decoder(config).initialize(0), model)
    done = agentgym("sft", "--env", "GuessNumber-v0", "--model", model, *QUICK, "--output", "out")
    assert done.code == 2 and "use the tokenizer that belongs to the model" in done.err
    assert not (tmp_path / "out").exists()


def test_processes_of_torchrun_are_named_the_ranks_of_ray(
    agentgym: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = agentgym("sft", "--env", "GuessNumber-v0", "--model", model)
    assert refused.code == 2 and "agentgym sft --executor ray --ray.learners 2" in refused.err


def test_out_of_gpu_memory_is_one_line_that_names_what_takes_less(
    agentgym: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("agentgym.trainers.learner.learner.Learner.update", fill)
    done = agentgym("sft", "--env", "GuessNumber-v0", "--model", model, *QUICK, "--output", "out")
    assert done.code == 1 and "error: a GPU has no memory left (CUDA out of memory)" in done.err
    assert "micro-batch-tokens" in done.err and "Traceback" not in done.err


def test_a_folder_of_an_earlier_version_is_a_model_and_is_not_resumed(
    agentgym: Command, model: Path, tmp_path: Path
) -> None:
    words = ("sft", "--env", "GuessNumber-v0", *QUICK)
    shutil.copytree(model, tmp_path / "old")
    settings = {
        "kind": "sft",
        "agentgym": "0.1.0",
        "env": "GuessNumber-v0",
        "model": str(model),
        "steps": 1,
        "epochs": 3,
        "batch_size": 1,
        "device": "cpu",
        "dtype": "auto",
        "threads": 1,
        "lora": {"rank": 0},
        "date": None,
        "checkpoint_minutes": 10.0,
        "trackers": [],
        "project": "lessons",
        "optimizer": {"learning_rate": 0.01},
    }
    (tmp_path / "old" / "config.yaml").write_text(yaml.safe_dump(settings))
    refused = agentgym("sft", "--resume", "--output", "old")
    assert refused.code == 2 and "is of an earlier version, and cannot be resumed" in refused.err
    assert agentgym(*words, "--model", "old", "--output", "new").code == 0
    again = agentgym("sft", "--config", "old/config.yaml", *ONLY_LEARN, "--output", "again")
    assert again.code == 0 and "checkpoint_minutes is left out" in again.err
    recorded = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    assert (recorded["steps"], recorded["learner"]["threads"], recorded["tracking"]["project"]) == (1, 1, "lessons")


def test_what_cannot_be_resumed_is_refused(agentgym: Command) -> None:
    assert "name it with --output" in agentgym("sft", "--resume").err
    refused = agentgym("sft", "--resume", "--output", "nothing")
    assert refused.code == 2 and "holds no run to go on with" in refused.err


def test_recorded_episodes_that_succeeded_are_learned(agentgym: Command, model: Path, tmp_path: Path) -> None:
    eval_words = ("GuessNumber-v0", "--env-kwargs", "level=1", "--tokenizer", model, "-n", 6, "--output")
    assert agentgym("eval", *eval_words, "random", "--policy", "random").code == 0
    assert agentgym("eval", *eval_words, "oracle", "--policy", "oracle").code == 0
    learned = ("sft", "--episodes", "oracle", "random", "--model", model, "--epochs", 2, "--batch-size", 3)
    done = agentgym(*learned, "--threads", 1, "--min-reward", 1, "--output", "out", "--json")
    assert done.code == 0, done.err
    assert "12 episodes are learned; left out: " in done.text and "with a reward below 1" in done.text
    assert "are of held-out tasks" in done.text
    assert done.json["steps"] == -(-2 * done.json["rows"] // 3) and done.json["demonstration_success"] == 1.0
    assert "agentgym eval --env GuessNumber-v0 --env-kwargs level=1 --policy out" in done.text
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["family"] == "hermes"
    load_decoder(tmp_path / "out")
    assert agentgym(*learned, "--min-reward", 2, "--output", "none").code == 2
    assert not (tmp_path / "none").exists()


def test_conversations_are_learned(
    agentgym: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}] * 2
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 5, encoding="utf-8")
    learned = ("sft", "--conversations", "talks.jsonl", "--model", model, "--optimizer.learning-rate", 0.01)
    sizes = ("--steps", 4, "--batch-size", 2, "--threads", 1, "--validation", f"file://{tmp_path}/talks.jsonl")
    done = agentgym(*learned, *sizes, "--output", "out", "--json")
    assert done.code == 0, done.err
    assert f"validation loss {done.json['validation_loss']:.4f}" in done.text
    assert done.json["rows"] == 5 and done.json["loss"] < done.json["loss_first"]
    assert done.json["demonstration_success"] is None
    assert "8 rows, 1.6 passes over 5" in done.text
    load_decoder(tmp_path / "out")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "env (demonstrations), conversations (files) or episodes (run folders); got none"),
        (("--env", "GuessNumber-v0", "--episodes", "."), "got env and episodes"),
        (("--episodes", "2"), "--batch-size 2"),
        (("--episodes", "."), "episodes.jsonl' does not exist"),
        (("--env", "GuessNumber-v0", "--validation", "a.jsonl"), "goes with conversations or episodes"),
        (("--episodes", ".", "--validation", "nothing"), "there is no run folder 'nothing'"),
        (("--conversations", "a.jsonl"), "no file 'a.jsonl'"),
        (("--conversations", "a.jsonl", "--min-reward", "1"), "min_reward goes with episodes"),
        (("--conversations", "a.jsonl", "--family", "hermess"), "did you mean 'hermes'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors_in_the_data_arguments_explain_what_to_do(
    args: tuple[str, ...], message: str, agentgym: Command, model: Path, tmp_path: Path
) -> None:
    done = agentgym("sft", *args, "--model", model, "--output", "out")
    assert done.code in (1, 2)
    assert message in done.err
    assert not (tmp_path / "out").exists()


def test_a_run_that_played_nothing_is_verified_by_its_steps(agentgym: Command, model: Path, tmp_path: Path) -> None:
    words = ("sft", "--env", "GuessNumber-v0", "--model", model, *QUICK)
    assert agentgym(*words, "--output", "learned").code == 0
    assert (tmp_path / "learned" / "episodes.jsonl.zst").stat().st_size == 0
    done = agentgym("verify", "learned")
    assert done.code == 0, done.text
    assert "0 episodes, 0 tokens: sound" in done.text
    metrics = tmp_path / "learned" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert "not sound: checkpoints, end" in agentgym("verify", "learned").text
