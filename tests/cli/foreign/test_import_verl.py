"""`agentgym import verl`: configurations and scripts of verl become settings of ours, and no key is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import pytest
import yaml

from agentgym.cli.foreign.keys import find_key, our_defaults, translate
from agentgym.cli.foreign.verl_file import read_overrides, read_verl
from agentgym.cli.foreign.verl_keys import VERL_KEYS
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.config import TrainConfig

Command = Callable[..., Any]
HERE = Path(__file__).parent
PROJECT = HERE / "verl_project"
DIALOG = HERE / "verl_dialog"
TURNS = "actor_rollout_ref.rollout.multi_turn"
SCRIPT = """
set -x
# a comment with key=value
n_resp=$((2 * 4)); export LR=1e-6
LR=${LR:-5e-6}
rollout_name="vllm" # sglang or vllm
DATA=(
    data.train_files=$HOME/data/gsm8k/train.parquet
    data.val_files="['$HOME/data/gsm8k/test.parquet']"
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=rloo \\
    "${DATA[@]}" \\
    data.train_batch_size=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=$LR \\
    actor_rollout_ref.rollout.name=$rollout_name \\
    actor_rollout_ref.rollout.n=${n_resp} \\
    +actor_rollout_ref.actor.unheard_of=True \\
    trainer.logger='["console","wandb"]' \\
    trainer.experiment_name=$UNSET_NAME \\
    trainer.total_epochs=15 $@
"""


def settings_of(*overrides: str) -> dict[str, Any]:
    return translate(read_overrides(overrides), VERL_KEYS).settings


def test_every_key_of_verl_is_in_the_table() -> None:
    names = (HERE / "verl_keys.txt").read_text().split()
    assert len(names) > 400
    assert [name for name in names if find_key(name, VERL_KEYS) is None] == []


def test_every_setting_of_the_table_is_ours() -> None:
    all_names = our_names()
    key_names = {name.strip() for key in VERL_KEYS for name in key.ours.split(",") if name.strip()}
    assert {
        name for name in key_names if not any(name == own or name.startswith(f"{own}.") for own in all_names)
    } == set()


def our_names() -> list[str]:
    grouped = [
        "env_kwargs",
        "chat_template_kwargs",
        "advantage.settings",
        "learner.loss_settings",
        "learner.correction_settings",
    ]
    return [*our_defaults(), *grouped, "optimizer.decay_settings", "reward.settings", "data.columns"]


def test_a_project_is_imported_with_overrides_and_its_file_is_a_run(agentgym: Command, tmp_path: Path) -> None:
    shutil.copytree(PROJECT, tmp_path, dirs_exist_ok=True)
    done = agentgym("import", "verl", "grpo.yaml", "actor_rollout_ref.rollout.n=8", "--json")
    assert done.code == 0, done.text
    assert done.json["unknown"] == []
    lost = {line["theirs"] for line in done.json["lost"]}
    assert lost - {"trainer.device"} == {"trainer.experiment_name"}  # on a machine without a GPU, its device too
    run = config_from_mapping(TrainConfig, yaml.safe_load(Path("run.yaml").read_text()))
    assert (run.tasks, run.group_size, run.steps, run.epochs, run.target_success) == (4, 8, 1, None, None)
    assert (run.data.train_files, run.data.tools) == (("train.parquet",), ("tool_config.yaml",))
    assert (run.env, run.env_kwargs["max_turns"]) == ("ToolPrompt-v0", 3)
    assert run.reward.function == "reward.py:compute_score"
    assert (run.learner.kl.coefficient, run.learner.kl.penalty, run.aggregation) == (0.001, "low_var", "token-mean")
    assert run.learner.loss_settings == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert (run.optimizer.weight_decay, run.optimizer.betas, run.optimizer.warmup_steps) == (0.01, (0.9, 0.999), 0)


@pytest.mark.long
def test_a_project_trains_a_step(agentgym: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import parquet

    shutil.copytree(PROJECT, tmp_path, dirs_exist_ok=True)
    table = parquet.read_table(HERE.parents[1] / "data" / "gsm8k" / "verl_20.parquet")
    parquet.write_table(table.slice(0, 12), "train.parquet")
    parquet.write_table(table.slice(12), "test.parquet")
    tool = Path("calculator.py")
    text = tool.read_text()
    assert text.count("from verl.tools.") == 2  # the two lines that the page says to change
    text = text.replace("from verl.tools.base_tool import BaseTool\n", "")
    tool.write_text(text.replace("from verl.tools.schemas import", "from agentgym.tools.verl_tools import BaseTool,"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert agentgym("import", "verl", "grpo.yaml", "actor_rollout_ref.model.path=embedded").code == 0
    planned = agentgym("train", "--config", "run.yaml", "--dry-run")
    assert planned.code == 0, planned.text
    done = agentgym("train", "--config", "run.yaml", "--eval.episodes", 0, "--output", "run", "--json")
    assert done.code == 0 and done.json["steps"] == 1, done.text


@pytest.mark.long
def test_a_project_with_an_interaction_trains_a_step(
    agentgym: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DIALOG, tmp_path, dirs_exist_ok=True)
    file = Path("number_interaction.py")
    line = "from verl.interactions.base import BaseInteraction"
    assert line in file.read_text()  # the one line that the page says to change
    file.write_text(file.read_text().replace(line, "from agentgym.tools.verl_interactions import BaseInteraction"))
    rows = [
        {
            "data_source": "own",
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {
                "index": number,
                "interaction_kwargs": {"name": "number", "query": "Try again.", "ground_truth": str(number + 1)},
            },
        }
        for number in range(4)
    ]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(str(tmp_path))
    imported = agentgym("import", "verl", "grpo_w_interaction.yaml", "--json")
    assert imported.code == 0 and imported.json["unknown"] == [], imported.text
    assert "interaction_config_path" not in {line["theirs"].rpartition(".")[2] for line in imported.json["lost"]}
    settings = imported.json["settings"]
    assert (settings["data.tools"], settings["env_kwargs.max_turns"]) == (["interaction_config.yaml"], 3)
    done = agentgym("train", "--config", "run.yaml", "--output", "run", "--json")
    assert done.code == 0 and done.json["steps"] == 1, done.text
    played = [record.trajectory for record in read_episodes(Path("run"))]
    assert len(played) == 8 and {trajectory.status.value for trajectory in played} <= {"completed", "truncated"}
    assert agentgym("verify", "run").code == 0
    words = ["--tools", "interaction_config.yaml", "--data.eval", "train.jsonl", "-n", 4, "--policy", "oracle"]
    assert agentgym("eval", *words, "--json").json["mean_reward"] == 1.0  # what the interaction gives a right reply


def test_a_script_is_read_and_not_run(agentgym: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("UNSET_NAME", raising=False)
    Path("run_rloo.sh").write_text(SCRIPT)
    done = agentgym("import", "verl", "run_rloo.sh", "--output", "rloo.yaml", "--json")
    assert done.code == 0, done.text
    settings = done.json["settings"]
    assert settings["data.train"] == ["/home/me/data/gsm8k/train.parquet"]
    assert settings["data.eval"] == ["/home/me/data/gsm8k/test.parquet"]
    assert (settings["algo"], settings["epochs"], settings["engine"], settings["trackers"]) == (
        "rloo",
        15,
        "vllm",
        ["wandb"],
    )
    assert (settings["tasks"], settings["learner.minibatches"], settings["optimizer.learning_rate"]) == (1024, 4, 1e-6)
    assert [line["theirs"] for line in done.json["unknown"]] == ["actor_rollout_ref.actor.unheard_of"]
    reasons = {line["theirs"]: line["ours"] for line in done.json["lost"]}
    assert "no constant" in reasons["trainer.experiment_name"]
    assert "set reward.function" in reasons["custom_reward_function.path"]  # no parquet here to read data_source from
    same = {line["theirs"] for line in done.json["same"]}
    assert "actor_rollout_ref.rollout.n" in same  # 8 is our default


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False"], {"algo": "dr_grpo"}),
        (
            ["algorithm.adv_estimator=gae", "algorithm.lam=0.95", "critic.optim.lr=2e-5"],
            {
                "algo": "gae",
                "advantage.settings.lam": 0.95,
                "learner.critic.learning_rate": 2e-5,
                "learner.critic.bootstrap": False,
            },
        ),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "actor_rollout_ref.actor.clip_ratio_low=3e-4"],
            {"learner.loss": "gspo", "aggregation": "seq-mean-token-mean", "learner.loss_settings.clip_low": 3e-4},
        ),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.01"],
            {"learner.kl.place": "reward", "learner.kl.penalty": "k1", "learner.kl.target": 0.1},
        ),
        (
            ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=5"],
            {"learner.correction": "tis_token", "learner.correction_settings.cap": 5.0},
        ),
        (
            ["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=64"],
            {"reward.overlong.buffer_tokens": 64, "reward.overlong.max_tokens": 512},
        ),
        (
            [
                "trainer.n_gpus_per_node=8",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
                "actor_rollout_ref.rollout.enforce_eager=True",
            ],
            {
                "executor": "ray",
                "ray.learners": 4,
                "ray.engines": 2,
                "server.server_args": ["--tensor-parallel-size", "2", "--enforce-eager"],
            },
        ),
        (
            ["trainer.n_gpus_per_node=8", "+actor_rollout_ref.actor.megatron.expert_model_parallel_size=2"],
            {"learner.mesh.expert": 2},
        ),
        (["trainer.total_training_steps=7", "trainer.total_epochs=3"], {"steps": 7}),
        (["trainer.total_training_steps=20", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1"], {"steps": 20}),
        (["actor_rollout_ref.model.lora_rank=8"], {"learner.lora.rank": 8, "learner.lora.learning_rate": 1e-6}),
        (["data.val_files=null"], {"eval.episodes": 0}),
        (
            ["actor_rollout_ref.actor.optim.optimizer=SGD", "+actor_rollout_ref.actor.optim.betas=[0.8,0.9]"],
            {"optimizer.name": "sgd", "optimizer.betas": None},
        ),
        (
            [f"{TURNS}.tool_config_path=a.yaml", f"{TURNS}.interaction_config_path=b.yaml"],
            {"data.tools": ["a.yaml", "b.yaml"]},
        ),
        (
            [f"{TURNS}.max_assistant_turns=4", f"{TURNS}.max_user_turns=2", f"{TURNS}.interaction_config_path=b.yaml"],
            {"env_kwargs.max_turns": 3, "data.tools": ["b.yaml"]},
        ),
        ([f"{TURNS}.max_assistant_turns=4"], {"limits.max_turns": 4}),
        (
            ["+data.apply_chat_template_kwargs.enable_thinking=False"],
            {"chat_template_kwargs.enable_thinking": False},
        ),
    ],
)
def test_values_have_the_meaning_that_they_have_there(overrides: list[str], expected: dict[str, Any]) -> None:
    settings = settings_of(*overrides)
    assert {name: settings.get(name) for name in expected} == expected


def test_what_a_default_decides_is_not_undone_by_another_default() -> None:
    ratio = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1"
    assert settings_of("trainer.total_training_steps=20", ratio).get("optimizer.warmup_steps", 2) == 2
    assert "epochs" not in settings_of("trainer.total_training_steps=7", "trainer.total_epochs=3")


def test_without_a_reward_file_the_scorer_follows_from_the_rows() -> None:
    rows = HERE.parents[1] / "data" / "gsm8k" / "verl_20.parquet"
    assert settings_of(f"data.train_files={rows}")["reward.function"] == "gsm8k"
    assert "reward.function" not in settings_of("data.train_files=nowhere.parquet")


def test_pointers_and_newer_places_of_keys_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    path.write_text(
        "data: {max_prompt_length: 128, train_batch_size: 8}\n"
        "reward: {custom_reward_function: {path: r.py, name: score, _target_: verl.Some}}\n"
        "actor_rollout_ref:\n  actor: {ppo_mini_batch_size: '${data.train_batch_size}'}\n"
        "  rollout: {n: '${oc.select:algorithm.n,4}', prompt_length: '${data.max_prompt_length}'}\n"
        "critic: {a: 3, b: '${.a}'}\n"
    )
    settings = read_verl(path, ["~critic.a"])
    assert settings["actor_rollout_ref.actor.ppo_mini_batch_size"] == 8
    assert (settings["actor_rollout_ref.rollout.n"], settings["custom_reward_function.name"]) == (4, "score")
    assert settings["critic.a"] is None and "reward.custom_reward_function._target_" not in settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.yaml"], "no file 'missing.yaml'"),
        (["empty.sh"], "starts no verl"),
        (["list.yaml"], "holds no settings"),
        (["a.yaml", "data.train_batch_size"], "an override is written key=value"),
        (["a.yaml", "data.train_batch_size=many"], "data.train_batch_size is a number, got 'many'"),
        (["a.yaml", "--output", "a.yaml"], "'a.yaml' exists"),
    ],
)
def test_a_mistake_is_one_line(agentgym: Command, words: list[str], message: str) -> None:
    Path("empty.sh").write_text("echo hello\n")
    Path("list.yaml").write_text("[1, 2]\n")
    Path("a.yaml").write_text("data: {train_files: a.parquet}\n")
    done = agentgym("import", "verl", *words)
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1
    assert not Path("run.yaml").exists()


def test_the_page_has_the_table_of_settings() -> None:
    page = Path(pages.__file__).with_name("verl.md").read_text(encoding="utf-8")
    assert pages.with_keys(page, pages.FOREIGN["verl"]) == page, "run python docs/pages.py"
