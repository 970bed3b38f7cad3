"""`agentgym train` from the command line: what it prints, what it leaves, and what typical mistakes cost."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from agentgym.chat_templates import renderer_for
from agentgym.cli.main import main
from agentgym.cli.training.options import MAIN_SETTINGS
from agentgym.embedded import embedded_folder
from agentgym.rollout import read_episodes
from agentgym.testing.fake_server.faults import Faults
from agentgym.testing.fake_server.server import FakeSglang

SMALL = "train --env TextGame-v0 --env-kwargs level=1 --tasks 2 --group-size 3 --eval.episodes 4".split()


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "agentgym", *args]


def limit_files_to_100_kb() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_run_prints_success_before_and_after_and_where_everything_lies(finished_run: Path) -> None:
    output = finished_run.with_suffix(".stderr").read_text(encoding="utf-8")
    result = json.loads(finished_run.with_suffix(".stdout").read_text(encoding="utf-8"))
    assert "before" in output and "after" in output and "peak memory" in output and "agentgym view" in output
    assert "agentgym eval --env TextGame-v0 --env-kwargs level=1 --policy" in output
    assert 0 <= result["success_before"] <= 1 and 0 <= result["success_after"] <= 1
    assert all(Path(path).exists() for path in result["files"].values())
    assert {"curve", "report", "checkpoint", "metrics", "episodes"} == set(result["files"])
    assert main(["verify", str(finished_run)]) == 0


@pytest.mark.long
def test_variables_of_the_template_are_those_of_the_run_and_of_its_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run, later = tmp_path / "model", tmp_path / "run", tmp_path / "later"
    shutil.copytree(embedded_folder(), model, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    template = tokenizer["chat_template"].removesuffix("{%- endif -%}\n")
    no_thoughts = "{%- if enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    tokenizer["chat_template"] = template + no_thoughts + "{%- endif -%}"  # as Qwen3's ends
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    few = [*SMALL, "--steps", "1", "--limits.max-turns", "2"]
    options = ["--chat-template-kwargs", "enable_thinking=false"]
    assert main([*few, "--model", str(model), *options, "--output", str(run)]) == 0
    renderer = renderer_for(model)
    for folder, further in ((run, ()), (later, ("--num-tasks", "2"))):
        if further:
            play = ["eval", "--env", "TextGame-v0", "--policy", str(run / "checkpoints" / "step-000001"), *further]
            assert main([*play, "--max-turns", "2", "--output", str(folder)]) == 0
        settings = yaml.safe_load((folder / "config.yaml").read_text())
        assert settings["chat_template_kwargs"] == {"enable_thinking": False}
        row = next(read_episodes(folder)).trajectory.rows[0]
        assert renderer.decode(row.spans[0].ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert main(["verify", str(folder)]) == 0
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    assert "--chat-template-kwargs enable_thinking=false\n" in capsys.readouterr().out


@pytest.mark.long
def test_a_base_model_gets_a_template_which_its_checkpoints_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, run, file = tmp_path / "base", tmp_path / "run", tmp_path / "chat.jinja"
    shutil.copytree(embedded_folder(), model, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    file.write_text(tokenizer.pop("chat_template"))
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    few = [*SMALL, "--model", str(model), "--limits.max-turns", "2"]
    assert main([*few, "--steps", "1", "--output", str(tmp_path / "none")]) == 1
    assert "give one with --chat-template FILE" in capsys.readouterr().err
    assert main([*few, "--chat-template", str(file), "--steps", "1", "--output", str(run)]) == 0
    assert main(["train", "--resume", "--output", str(run), "--steps", "2"]) == 0
    assert main(["verify", str(run)]) == 0
    checkpoint = run / "checkpoints/step-000002"
    assert (checkpoint / "chat_template.jinja").read_text() == file.read_text()
    file.unlink()
    play = ["eval", "--env", "TextGame-v0", "--num-tasks", "2", "--max-turns", "2", "--output", str(tmp_path / "later")]
    assert main([*play, "--policy", str(checkpoint)]) == 0
    assert main([*play, "--policy", str(model), "--chat-template", str(file)]) == 2
    assert "chat.jinja' cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_the_history_and_the_chat_format_are_settings_that_the_run_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = [*SMALL, "--steps", "1", "--output", str(run), "--history", "rerender", "--family", "chatml"]
    assert main([*options, "--compaction.at", "0.5"]) == 0
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert (settings["family"], settings["history"]) == ("hermes", "rerender")
    assert settings["compaction"] == {"at": 0.5, "tokens": 512, "train": True}
    assert main(["verify", str(run)]) == 0
    assert main([*options, "--resume"]) == 2
    assert "compaction.at: 0.5 there, None here" in capsys.readouterr().err
    assert main(["train", "--resume", "--output", str(run), "--steps", "2"]) == 0
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert main(["train", "--resume", "--output", str(tmp_path / "other")]) == 2
    assert "holds no run to go on with" in capsys.readouterr().err
    assert main([*SMALL, "--family", "hermse", "--output", str(tmp_path / "other")]) == 2
    assert "hermes" in capsys.readouterr().err and not (tmp_path / "other").exists()
    assert main([*SMALL, "--serve", "0", "--compaction.at", "0.5"]) == 2
    assert "leave compaction.at out" in capsys.readouterr().err


def test_print_config_gives_what_config_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--optimizer.learning-rate", "0.001", "--print-config"]) == 0
    file = tmp_path / "run.yaml"
    file.write_text(capsys.readouterr().out)
    assert main(["train", "--config", str(file), "--seed", "7", "--print-config"]) == 0
    again = capsys.readouterr().out
    assert again == file.read_text().replace("seed: 0", "seed: 7", 1)


def test_processes_of_environments_have_the_same_option_as_in_eval(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--env-processes", "2"], ["--env-processes=2"], ["--sampler.env-processes", "2"]):
        assert main([*SMALL, *words, "--print-config"]) == 0
        assert "\n  env_processes: 2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["--profile"], [2]),
        (["--profile", "--seed", "1"], [2]),
        (["--profile", "5", "6"], [5, 6]),
        (["--profile=7"], [7]),
        (["--profile.steps", "8"], [8]),
    ],
)
def test_profile_names_the_steps_to_trace_and_alone_the_second(
    words: list[str], steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words, "--trackers", "tensorboard", "mlflow", "--print-config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["profile"]["steps"] == steps
    assert config["trackers"] == ["tensorboard", "mlflow"]


@pytest.mark.parametrize(
    ("words", "settings", "loss_settings"),
    [
        (["--algo", "dapo"], {}, {"clip_high": 0.28}),
        (["--algo", "dapo", "--learner.loss-settings", "clip_high=0.3"], {}, {"clip_high": 0.3}),
        (["--algo", "dapo", "--learner.loss-settings"], {}, {}),
        (["--algo", "gigpo", "--advantage.settings", "gamma=0.5"], {"gamma": 0.5}, {}),
    ],
)
def test_settings_that_an_algo_may_set_are_options_too(
    words: list[str],
    settings: dict[str, float],
    loss_settings: dict[str, float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, *words, "--print-config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["advantage"]["settings"], config["learner"]["loss_settings"]) == (settings, loss_settings)


@pytest.mark.parametrize("stored", ["true", "false"])
def test_a_switch_of_a_file_can_be_turned_both_ways(
    stored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"env: TextGame-v0\nallow_single: {stored}\nengine: sglang\n")
    for word, value in (("--allow-single", "true"), ("--no-allow-single", "false")):
        assert main(["train", "--config", str(file), "--print-config", word]) == 0
        assert f"allow_single: {value}" in capsys.readouterr().out


def test_the_environment_may_be_named_beside_a_configuration_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 3\noptimizer:\n  learning_rate: 1e-4\n")
    assert main(["train", "--env", "TextGame-v0", "--config", str(file), "--print-config"]) == 0
    output = capsys.readouterr().out
    assert "env: TextGame-v0" in output and "steps: 3" in output and "learning_rate: 0.0001" in output
    assert main(["train", "--config", str(file)]) == 2
    assert "missing --env" in capsys.readouterr().err


def test_help_shows_the_settings_that_matter_in_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  --")]
    assert names == [f"--{name.replace('_', '-')}" for name in MAIN_SETTINGS] and len(names) == 23
    assert "      Tasks per step; each is played by one group. (default: 16)" in lines
    assert "All settings: agentgym train --help-all" in lines


def test_a_dry_run_counts_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run"
    assert main([*SMALL, "--steps", "5", "--output", str(output), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["episodes_per_step"], plan["optimizer_steps"], plan["episodes_in_all"]) == (6, 5, 30)
    assert plan["memory_MB"] > 100 and not output.exists()


@pytest.mark.parametrize(
    ("option_text", "message"),
    [
        ("--reward.function nosuch.py:brief", "no file 'nosuch.py'"),
        ("--reward.function math=1 nosuch.py:brief=2", "no file 'nosuch.py'"),
        ("--trackers wandbb", "unknown tracker 'wandbb'"),
        ("--observers nosuch.py:Mine", "no file 'nosuch.py'"),
        ("--practice.sampler nosuch.py:Mine", "no file 'nosuch.py'"),
        ("--eval.mix NoSuch-v0=1", "unknown env 'NoSuch-v0'"),
        ("--learner.kl.reference nosuch --learner.kl.coefficient 0.1", "no model folder 'nosuch'"),
        ("--env-kwargs opponent=self --rival nosuch", "there is no model in 'nosuch' to be the rival"),
        ("--engine nosuch.py:mine", "no file 'nosuch.py'"),
        ("--engine sglang --server.python /nosuch", "'/nosuch' is not an interpreter with sglang"),
        (f"--engine vllm --server.python {sys.executable}", "is not an interpreter with vllm"),
        ("--output full", "'full' already holds a run"),
        ("--output full/config.yaml", "'full/config.yaml', which is not a folder"),
        ("--resume --output nosuch", "'nosuch' holds no run"),
        ("--checkpoint.copy-to nosuch://bucket", "'nosuch://bucket' cannot be opened"),
    ],
)
def test_a_dry_run_refuses_what_the_run_could_not_open(
    option_text: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.yaml").write_text("env: TextGame-v0\n")
    monkeypatch.chdir(tmp_path)
    env = "TicTacToe-v0" if "opponent" in option_text else "TextGame-v0"
    assert main(["train", "--env", env, *option_text.split(), "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_a_dry_run_prints_what_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*args: str) -> tuple[dict[str, int], str]:
        assert main([*SMALL, "--dry-run", "--json", *args]) == 0
        printed = capsys.readouterr()
        counts: dict[str, int] = json.loads(printed.out)
        return counts, " ".join(printed.err.split())

    (full, full_text), (lora, lora_text) = (
        plan(),
        plan("--learner.lora.rank", "8", "--learner.lora.target-modules", "o_proj"),
    )
    assert full["trained_parameters"] == full["model_parameters"] and "all of the model's" in full_text
    assert lora["trained_parameters"] == 4 * 8 * (128 + 128) and lora["model_parameters"] == full["model_parameters"]
    assert "adapters of rank 8 on o_proj, at a learning rate of 0.004" in lora_text
    assert lora["memory_MB"] < full["memory_MB"]


def test_settings_of_another_engine_are_noticed_and_a_dry_run_tells_the_servers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [*SMALL, "--server.urls", "http://a:1", "http://b:2", "--dry-run"]
    assert main(options) == 0
    local = capsys.readouterr()
    assert "settings of server are given, and the engine is local: add --engine sglang or --engine vllm" in local.err
    assert main([*SMALL, "--ray.learners", "2", "--dry-run"]) == 0
    assert "settings of ray are given, and the executor is local: add --executor ray" in capsys.readouterr().err
    assert main([*options, "--engine", "sglang"]) == 0
    sglang = capsys.readouterr()
    assert re.search(r"sglang servers +2 +that run: http://a:1, http://b:2", sglang.out)
    assert "servers" not in local.out and not sglang.err


@pytest.mark.long
def test_an_invalid_server_is_named_and_the_folder_stays_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    options = [*SMALL, "--engine", "sglang", "--output", str(tmp_path / "run"), "--server.urls"]
    assert main([*options, "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    with FakeSglang() as server:
        assert main([*SMALL, "--engine", "vllm", "--server.urls", server.url, "--output", str(tmp_path / "run")]) == 1
        assert "is not a vLLM server that reports its weights" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
        # what a fake server says is not what the model would: only a bound that is off lets it through
        assert main([*options, f"{server.url}/v1"]) == 1
        assert "Likely cause: template or model" in capsys.readouterr().err
        assert main([*options, f"{server.url}/v1", "--parity.max-mismatch", "1000", "--steps", "1"]) == 0
    output = capsys.readouterr().out
    assert "sync s  mismatch" in output
    assert main(["verify", str(tmp_path / "run")]) == 0


@pytest.mark.long
def test_a_run_whose_server_dies_prints_how_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    options = [*SMALL, "--engine", "sglang", "--output", str(folder), "--parity.max-mismatch", "1000"]
    with FakeSglang() as server:
        assert main([*options, "--server.urls", server.url, "--steps", "1"]) == 0
        capsys.readouterr()
        server.set_faults(Faults(rates={"die": 1.0}))
        assert main([*options, "--server.urls", server.url, "--steps", "2", "--resume"]) == 1
    assert f"--resume --output {folder} goes on from step 1" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--env", "TextGme-v0"], "did you mean 'TextGame-v0'"),
        (["train", "--env", "TextGame-v0", "--stepz", "3"], "did you mean '--steps'"),
        (["train", "--env", "TextGame-v0", "--model", "nowhere"], "nowhere"),
        (["train", "--env", "TextGame-v0", "--group-size", "1"], "group_size 1 has no baseline"),
        (["train", "--env", "TextGame-v0", "--sampling.temperature", "0"], "above 0, got 0.0"),
        (["train", "--env", "TextGame-v0", "--env-kwargs", "level=9"], "no level 9"),
        (["train", "--env", "TextGame-v0", "--config", "absent.yaml"], "absent.yaml"),
        (["train", "--env", "TextGame-v0", "--resume"], "--output"),
        (["train", "--env", "TextGame-v0", "--server.replicas", "0"], "error: server: replicas must be at least 1"),
        (["train", "--env", "TextGame-v0", "--server.urls", "http://a", "http://a/v1"], "'http://a' is given twice"),
        (["train", "--env", "TextGame-v0", "--server.urls", "a:1"], "begins with http://, got 'a:1'"),
        (["train", "--env", "TextGame-v0", "--output", "/dev/null/run"], "give another --output"),
    ],
)
def test_a_typical_mistake_is_one_line_and_writes_nothing(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.startswith("error: ") and "\n" not in error
    assert not list(tmp_path.iterdir())


def test_torchrun_is_refused_with_the_options_that_begin_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main([*SMALL, "--dry-run"]) == 2
    assert "agentgym train --executor ray --ray.learners 4" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_ctrl_c_or_sigterm_in_the_middle_of_a_step_keeps_the_last_whole_step(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    args = command(*SMALL, "--steps", "200", "--eval.episodes", "0", "--output", str(run))
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        metrics = run / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.1)
        process.send_signal(number)
        if number == signal.SIGTERM:  # as Slurm repeats it
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "--resume" in errors and "Traceback" not in errors
    steps = len(metrics.read_text().splitlines())
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{steps:06d}"]


@pytest.mark.slow
def test_ctrl_c_ends_a_run_whose_engine_is_being_compiled(tmp_path: Path) -> None:
    """The compiler hangs, as one does for a minute on a machine with other work."""
    reached, compiler = tmp_path / "reached", tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *--version*) exec g++ "$@";; esac\ntouch {reached}\nexec sleep 60\n')
    compiler.chmod(0o755)
    args = command("train", "--env", "TextGame-v0", "--steps", "1", "--output", str(tmp_path / "run"))
    env = {**os.environ, "CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not reached.exists():
            assert process.poll() is None
            time.sleep(0.05)
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert time.monotonic() - interrupted < 30
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_what_was_written_stays_whole(tmp_path: Path) -> None:
    args = command(*SMALL, "--steps", "30", "--output", str(tmp_path / "run"))
    done = subprocess.run(
        args, capture_output=True, text=True, preexec_fn=limit_files_to_100_kb, timeout=180, env={**os.environ}
    )
    assert done.returncode == 2
    assert "cannot" in done.stderr and "Traceback" not in done.stderr
    assert [*read_episodes(tmp_path / "run")]


def test_an_environment_that_always_raises_ends_the_run_with_its_own_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "from agentgym.envs import ToolEnv\n\n\nclass Broken(ToolEnv):\n    max_turns = 3\n\n"
        "    def start(self, options):\n        return 'x'\n\n"
        "    def step(self, action):\n        raise ValueError('the wire is cut')\n"
    )
    small = ["--tasks", "2", "--group-size", "2", "--output", str(tmp_path / "r")]
    assert main(["train", "--env", f"{file}:Broken", *small]) == 1
    errors = capsys.readouterr().err
    assert errors.count("ValueError: the wire is cut") >= 1
    assert errors.count("Traceback (most recent call last)") == 1
    assert "agentgym play" in errors
