"""`agentgym import trl`: arguments and scripts of TRL become settings of ours; a script is read, and never run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import pytest
import yaml

from agentgym.cli.foreign.keys import find_key, our_defaults, translate
from agentgym.cli.foreign.trl_keys import TRL_KEYS
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.config import TrainConfig

Command = Callable[..., Any]
HERE = Path(__file__).parent
PROJECT = HERE / "trl_project"
IMPORTS = (
    "from datasets import load_dataset\n",
    "from peft import LoraConfig\n",
    "from trl import GRPOConfig, GRPOTrainer\n",
)


def settings_of(**arguments: Any) -> dict[str, Any]:
    return translate(arguments, TRL_KEYS).settings


def test_every_argument_of_trl_is_in_the_table() -> None:
    names = (HERE / "trl_keys.txt").read_text().split()
    assert len(names) > 200
    assert [name for name in names if find_key(name, TRL_KEYS) is None] == []


def test_every_setting_of_the_table_is_ours() -> None:
    our_names = [*our_defaults(), "advantage.settings", "learner.loss_settings", "learner.correction_settings"]
    our_names += ["env_kwargs", "chat_template_kwargs", "optimizer.decay_settings", "optimizer.weight_decays"]
    key_names = {name.strip() for key in TRL_KEYS for name in key.ours.split(",") if name.strip()}
    assert {
        name for name in key_names if not any(name == own or name.startswith(f"{own}.") for own in our_names)
    } == set()


def test_norms_and_biases_have_no_weight_decay_as_in_trl() -> None:
    assert "optimizer.weight_decay" not in settings_of()
    settings = settings_of(weight_decay=0.1)
    assert (settings["optimizer.weight_decay"], settings["optimizer.weight_decays"]) == (0.1, {"norm|bias": 0.0})
    assert "optimizer.weight_decays" not in settings_of(weight_decay=0.1, lora_r=8)


@pytest.mark.parametrize("name", ["sgd", "adafactor"])
def test_an_optimizer_other_than_adamw_has_the_weight_decay_and_no_betas_as_there(name: str) -> None:
    settings = settings_of(optim=name, weight_decay=0.1, adam_beta1=0.8)
    assert (settings["optimizer.name"], settings["optimizer.weight_decay"]) == (name, 0.1)
    assert "optimizer.betas" not in settings
    assert settings_of(adam_beta1=0.8)["optimizer.betas"] == [0.8, 0.999]


def test_stop_strings_are_found_among_the_arguments_of_generation() -> None:
    assert settings_of(generation_kwargs={"stop": "</answer>"})["sampling.stop"] == ["</answer>"]
    assert settings_of(generation_kwargs={"stop_strings": ["a", "b"]})["sampling.stop"] == ["a", "b"]
    translation = translate({"generation_kwargs": {"stop": ["a"], "num_beams": 2}}, TRL_KEYS)
    (line,) = translation.of("lost")
    assert "no setting for num_beams" in line.ours and "sampling.stop: ['a']" in line.ours


@pytest.mark.long
def test_a_script_is_imported_and_trains_a_step(agentgym: Command, tmp_path: Path) -> None:
    shutil.copytree(PROJECT, tmp_path, dirs_exist_ok=True)
    script = Path("train_lock.py")
    text = script.read_text()
    for line in IMPORTS:  # TRL is not installed here: the three lines move into main, as the page says
        assert text.count(line) == 1
        text = text.replace(line, "")
    body = "".join(f"    {line}" for line in IMPORTS)
    script.write_text(text.replace("def main():\n", f"def main():\n{body}"))
    imported = agentgym("import", "trl", "train_lock.py", "model=embedded", "--json")
    assert imported.code == 0, imported.text
    assert [line["theirs"] for line in imported.json["lost"]] == ["output_dir"] and imported.json["unknown"] == []
    run = config_from_mapping(TrainConfig, yaml.safe_load(Path("run.yaml").read_text()))
    assert (run.tasks, run.group_size, run.learner.minibatches, run.steps, run.seed) == (2, 4, 1, 1, 42)
    assert (run.learner.lora.rank, run.learner.lora.alpha, run.learner.lora.learning_rate) == (8, 16.0, 1e-5)
    assert run.learner.loss_settings == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert (run.aggregation, run.advantage.settings) == ("token-mean", {"epsilon": 1e-4})
    assert (run.data.train_files, run.data.tools) == (("locks.jsonl",), ("train_lock.py:Lock",))
    assert agentgym("train", "--config", "run.yaml", "--eval.episodes", 0, "--dry-run").code == 0
    done = agentgym("train", "--config", "run.yaml", "--eval.episodes", 0, "--data.keep", "code", "--output", "run")
    assert done.code == 0, done.text


def test_a_script_is_never_run_and_what_is_no_constant_is_listed(agentgym: Command) -> None:
    Path("reward.py").write_text("def brief(completions, **kwargs):\n    return [0.0]\n")
    Path("train.py").write_text(
        "import os, trl\n"
        "from reward import brief\n"
        "raise SystemExit('run')\n"
        "SIZE = 2 * 8\n"
        "tools = []\ntools.append(brief)\n"
        "data = trl.load_dataset('openai/gsm8k', 'main', split='train')\n"
        "args = trl.GRPOConfig('out', num_generations=SIZE, learning_rate=float(os.environ['LR']), **more)\n"
        "trl.GRPOTrainer('a/model', brief, args, train_dataset=data, tools=tools, callbacks=[Stop()])\n"
    )
    done = agentgym("import", "trl", "train.py", "--json")
    assert done.code == 0, done.text
    settings = done.json["settings"]
    assert (settings["model"], settings["reward.function"], settings["group_size"]) == (
        "a/model",
        "reward.py:brief",
        16,
    )
    assert settings["data.train"] == ["openai/gsm8k:main:train"]
    lost = {line["theirs"]: line["ours"] for line in done.json["lost"]}
    assert "learning_rate=VALUE" in lost["learning_rate"] and {"output_dir", "callbacks", "tools"} <= lost.keys()
    assert [line["theirs"] for line in done.json["unknown"]] == ["**2"]
    assert "optimizer.learning_rate" not in settings


def test_arguments_of_trls_own_command_are_read(agentgym: Command) -> None:
    Path("grpo.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: trl-lib/DeepMath-103K\nlearning_rate: 1e-5\n"
        "use_peft: true\nlora_r: 16\nnum_generatons: 4\ntop_p: 0.9\nmin_p: 0.0\nmax_steps: 100\nwarmup_ratio: 0.1\n"
    )
    done = agentgym("import", "trl", "grpo.yaml", "per_device_train_batch_size=16", "--json")
    assert done.code == 0, done.text
    settings = done.json["settings"]
    assert (settings["data.train"], settings["tasks"], settings["learner.lora.rank"]) == (
        ["trl-lib/DeepMath-103K:train"],
        2,
        16,
    )
    assert (settings["optimizer.learning_rate"], settings["optimizer.warmup_steps"], settings["steps"]) == (
        1e-5,
        10,
        100,
    )
    assert "did you mean 'num_generations'" in done.json["unknown"][0]["ours"]
    assert [line["theirs"] for line in done.json["lost"]] == ["top_p"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"learner.loss": "ppo_clip", "aggregation": "token-mean", "tasks": 1, "epochs": None}),
        ({"loss_type": "grpo"}, {"aggregation": "seq-mean-token-mean"}),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, {"norm_tokens": 512, "algo": "dr_grpo"}),
        ({"reward_funcs": ["a.py:f", "a.py:g"]}, {"reward.function": ["a.py:f", "a.py:g"]}),
        (
            {"reward_funcs": ["a.py:f", "a.py:g"], "reward_weights": [1, 0.5], "environment_factory": "a.py:Lock"},
            {"reward.function": ["environment", "a.py:f", "a.py:g=0.5"]},
        ),
        ({"reward_funcs": "a.py:f", "reward_weights": [2.0]}, {"reward.function": ["a.py:f=2"]}),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"learner.loss": "cispo", "learner.loss_settings.clip_high": 4.0},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            {"learner.loss": "gspo", "learner.loss_settings.clip_high": 4e-4},
        ),
        ({"delta": 4.0}, {"learner.loss_settings.dual_clip": 4.0}),
        ({"beta": 0.04}, {"learner.kl.coefficient": 0.04}),
        (
            {"steps_per_generation": 8, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 80},
            {"tasks": 8, "learner.minibatches": 4, "learner.epochs": 2, "steps": 10},
        ),
        ({"generation_batch_size": 64, "num_processes": 4}, {"tasks": 8, "learner.minibatches": 2}),
        ({"use_vllm": True}, {"engine": "vllm", "learner.correction": "mis_sequence"}),
        ({"lr_scheduler_type": "linear"}, {"optimizer.decay_settings.flat": 0.0}),
        ({"mask_truncated_completions": True}, {"truncated_episodes": "leave_out"}),
        ({"max_tool_calling_iterations": 4, "tools": ["t.py:add"]}, {"env_kwargs.max_turns": 5}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"eval_strategy": "steps", "eval_steps": 50}, {"eval.every": 50}),
    ],
)
def test_arguments_have_the_meaning_that_they_have_there(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = settings_of(**arguments)
    assert {name: settings.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "has no GRPOConfig(...)"),
        ("GKDTrainer('m')\n", "there is --algo distill"),
        ("SFTConfig()\nDPOTrainer('m')\n", "has DPOTrainer and SFTConfig: name one with --trainer"),
        ("x = (\n", "cannot be read as Python"),
    ],
)
def test_a_script_without_grpo_is_refused_in_one_line(agentgym: Command, text: str, message: str) -> None:
    Path("s.py").write_text(text)
    done = agentgym("import", "trl", "s.py")
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1


def test_the_page_has_the_table_of_arguments() -> None:
    page = Path(pages.__file__).with_name("trl.md").read_text(encoding="utf-8")
    assert pages.with_keys(page, pages.FOREIGN["trl"]) == page, "run python docs/pages.py"
