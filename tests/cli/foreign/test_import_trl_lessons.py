"""`agentgym import trl` of SFTConfig and DPOConfig: what `agentgym sft` and `agentgym dpo` take as --config."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentgym.cli.foreign.keys import Key, find_key, translate
from agentgym.cli.foreign.trl_lessons import DPO_KEYS, SFT_KEYS
from agentgym.settings.config_class import flatten_settings
from agentgym.trainers.lessons.config import DpoConfig, SftConfig

Command = Callable[..., Any]
HERE = Path(__file__).parent
KEYS = {"sft": SFT_KEYS, "dpo": DPO_KEYS}
DEFAULTS = {
    "sft": flatten_settings(asdict(SftConfig(conversations=("rows.jsonl",)))),
    "dpo": flatten_settings(asdict(DpoConfig(pairs=("rows.jsonl",)))),
}
SFT_SCRIPT = """from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

rows = load_dataset("json", data_files="talks.jsonl", split="train")
config = SFTConfig("out", per_device_train_batch_size=1, gradient_accumulation_steps=2, num_train_epochs=2,
                   packing=True,
                   assistant_only_loss=True, lr_scheduler_type="constant", max_length=512, learning_rate=1e-4)
SFTTrainer("embedded", config, train_dataset=rows, eval_dataset="held.jsonl").train()
"""
DPO_SCRIPT = """from trl import DPOConfig, DPOTrainer

config = DPOConfig("out", loss_type=["ipo", "sft"], loss_weights=[1.0, 0.5], beta=0.3, max_steps=2,
                   per_device_train_batch_size=2)
DPOTrainer("embedded", None, config, train_dataset="pairs.jsonl").train()
"""


def translate_all(trainer: str, **arguments: Any) -> dict[str, Any]:
    return translate(arguments, KEYS[trainer], defaults=DEFAULTS[trainer]).settings


def fates(keys: tuple[Key, ...], trainer: str, **arguments: Any) -> dict[str, str]:
    return {line.theirs: line.outcome for line in translate(arguments, keys, defaults=DEFAULTS[trainer]).lines}


@pytest.mark.parametrize("trainer", KEYS)
def test_every_argument_is_in_the_table(trainer: str) -> None:
    names = (HERE / f"trl_{trainer}_keys.txt").read_text().split()
    assert len(names) > 150
    assert [name for name in names if find_key(name, KEYS[trainer]) is None] == []


@pytest.mark.parametrize("trainer", KEYS)
def test_every_setting_of_the_table_is_one_of_the_command(trainer: str) -> None:
    our_names = [*DEFAULTS[trainer], "optimizer.decay_settings", "optimizer.weight_decays"]
    key_names = {name.strip() for key in KEYS[trainer] for name in key.ours.split(",") if name.strip()}
    assert key_names <= set(our_names)


@pytest.mark.long
def test_a_script_of_sft_is_imported_and_learns(agentgym: Command) -> None:
    talk = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]}
    for name in ("talks", "held"):
        Path(f"{name}.jsonl").write_text(3 * (json.dumps(talk) + "\n"))
    Path("sft.py").write_text(SFT_SCRIPT)
    done = agentgym("import", "trl", "sft.py", "--output", "sft.yaml", "--json")
    assert done.code == 0, done.text
    assert "try next: agentgym sft --config sft.yaml" in done.err
    assert [line["theirs"] for line in done.json["lost"]] == ["output_dir", "max_length"]
    assert done.json["unknown"] == []
    learned = agentgym("sft", "--config", "sft.yaml", "--output", "run", "--json")
    assert learned.code == 0, learned.text
    assert (learned.json["steps"], learned.json["rows"]) == (3, 3)  # 2 passes over 3 rows, 2 a step
    run = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (run["batch_size"], run["epochs"], run["seed"], run["validation"]) == (2, 2, 42, ["held.jsonl"])
    optimizer = run["optimizer"]
    assert (optimizer["name"], optimizer["learning_rate"], optimizer["betas"]) == ("adamw", 1e-4, [0.9, 0.999])
    assert (optimizer["decay"], optimizer["warmup_steps"]) == ("constant", 0)
    same = agentgym("sft", "--config", "run/config.yaml", "--output", "same", "--json")
    assert same.code == 0, same.text
    assert Path("same/config.yaml").read_bytes() == Path("run/config.yaml").read_bytes()
    assert Path("same/model.safetensors").read_bytes() == Path("run/model.safetensors").read_bytes()
    again = agentgym("sft", "--config", "sft.yaml", "--steps", "1", "--output", "other", "--json")
    assert again.json["steps"] == 1, "an option wins over the file"


def test_a_script_of_dpo_is_imported_and_learns(agentgym: Command) -> None:
    pair = {"prompt": "Who?", "chosen": "Me.", "rejected": "You."}
    Path("pairs.jsonl").write_text(4 * (json.dumps(pair) + "\n"))
    Path("dpo.py").write_text(DPO_SCRIPT)
    done = agentgym("import", "trl", "dpo.py", "--json")
    assert done.code == 0, done.text
    assert [line["theirs"] for line in done.json["lost"]] == ["output_dir"]
    learned = agentgym("dpo", "--config", "run.yaml", "--output", "out", "--json")
    assert learned.code == 0, learned.text
    assert (learned.json["steps"], learned.json["pairs"]) == (2, 4)
    run = yaml.safe_load(Path("out/config.yaml").read_text())
    assert (run["loss"], run["sft_weight"], run["beta"], run["batch_size"]) == ("ipo", 0.5, 0.3, 2)
    assert (run["optimizer"]["learning_rate"], run["optimizer"]["decay_settings"]) == (1e-6, {"flat": 0.0})


@pytest.mark.parametrize(
    ("trainer", "arguments", "expected"),
    [
        ("sft", {}, {"optimizer.name": "adamw", "optimizer.learning_rate": 2e-5, "seed": 42, "epochs": None}),
        ("sft", {"max_steps": 7}, {"steps": 7, "epochs": None}),
        ("sft", {"num_train_epochs": 1.5}, {"epochs": 1.5}),
        ("sft", {"save_steps": 50, "save_total_limit": 3}, {"checkpoint.every": 50, "checkpoint.keep": 3}),
        ("sft", {"per_device_train_batch_size": 4, "num_processes": 8}, {"batch_size": 32}),
        ("sft", {"bf16": True, "use_cpu": True}, {"learner.dtype": "bfloat16", "learner.device": None}),
        ("dpo", {"gradient_checkpointing": True}, {"learner.activation_checkpointing": True}),
        ("sft", {"report_to": ["wandb"], "project": "mine"}, {"trackers": ["wandb"], "tracking.project": "mine"}),
        ("sft", {"weight_decay": 0.1}, {"optimizer.weight_decays": {"norm|bias": 0.0}}),
        ("sft", {"lora_r": 8, "lora_alpha": 4}, {"learner.lora.rank": 8, "learner.lora.learning_rate": 2e-5}),
        ("sft", {"dataset_name": "trl-lib/Capybara"}, {"conversations": ["trl-lib/Capybara:train"]}),
        ("dpo", {}, {"epochs": 3, "loss": None, "beta": None, "optimizer.learning_rate": 1e-6}),
        ("dpo", {"loss_type": "hinge"}, {"loss": "hinge"}),
        ("dpo", {"label_smoothing": 0.1, "beta": 0.5}, {"label_smoothing": 0.1, "beta": 0.5}),
    ],
)
def test_arguments_have_the_meaning_that_they_have_there(
    trainer: str, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings = translate_all(trainer, **arguments)
    assert {name: settings.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("trainer", "arguments"),
    [
        ("sft", {"loss_type": "dft"}),
        ("sft", {"completion_only_loss": False}),
        ("sft", {"peft_config.use_dora": True}),
        ("dpo", {"loss_type": ["sigmoid", "bco_pair"]}),
        ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 1.0]}),
        ("dpo", {"ref_model": "another/model"}),
        ("dpo", {"f_divergence_type": "js_divergence"}),
        ("dpo", {"sync_ref_model": True}),
    ],
)
def test_what_they_do_not_have_is_listed(trainer: str, arguments: dict[str, Any]) -> None:
    name = next(iter(arguments))
    assert fates(KEYS[trainer], trainer, **arguments)[name] == "lost"


def test_the_tokens_that_trl_learns_by_default_are_named() -> None:
    assert fates(SFT_KEYS, "sft")["assistant_only_loss"] == "lost"
    assert "assistant_only_loss" not in fates(SFT_KEYS, "sft", completion_only_loss=True)


def test_arguments_without_a_script_name_their_trainer(agentgym: Command) -> None:
    Path("args.yaml").write_text("model_name_or_path: embedded\nlearning_rate: 1e-5\nmax_lenght: 9\ntools: [a]\n")
    done = agentgym("import", "trl", "args.yaml", "--trainer", "sft", "--json")
    assert done.code == 0, done.text
    assert done.json["settings"]["optimizer.learning_rate"] == 1e-5
    assert "did you mean 'max_length'" in done.json["unknown"][0]["ours"]
    assert "no rows are named in it: add conversations" in done.err
    refused = agentgym("sft", "--config", "run.yaml")
    assert refused.code == 2 and "one source is learned from: env (demonstrations)" in refused.err
    refused = agentgym("import", "verl", "args.yaml", "--trainer", "sft", "--output", "other.yaml")
    assert refused.code == 2 and "--trainer is one of TRL's" in refused.err
    Path("sft.py").write_text(SFT_SCRIPT)
    refused = agentgym("import", "trl", "sft.py", "--trainer", "dpo", "--output", "other.yaml")
    assert refused.code == 2 and "has no DPOConfig(...) and no DPOTrainer(...)" in refused.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "holds no settings: it must be a mapping"),
        ("a: [\n", "is not YAML"),
        ("optimizer: {lerning_rate: 3}\n", "unknown setting 'optimizer.lerning_rate': did you mean 'learning_rate'?"),
        ("optimizer: 3\n", "setting 'optimizer' holds settings of its own: name,"),
        ("pairs: [x.jsonl]\nbeta: much\n", "setting 'beta' is a number, got 'much'"),
    ],
)
def test_a_file_of_settings_that_cannot_be_read_is_one_line(agentgym: Command, text: str, words: str) -> None:
    Path("c.yaml").write_text(text)
    done = agentgym("dpo", "--config", "c.yaml")
    assert done.code == 2 and words in done.err and done.err.count("\n") == 1
