"""`agentgym train` with mixes, curricula, replay and filters, and what mistakes with them are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from agentgym.cli.main import main
from agentgym.rollout.record.episodes_file import read_episodes

SMALL = "--steps 1 --tasks 3 --group-size 2 --limits.max-turns 4".split()
CURRICULUM = ["--practice.curriculum.method", "steps", "--practice.curriculum.values", "1", "2"]


@pytest.mark.slow
def test_a_mix_is_trained_and_told_for_each_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = ["train", "--mix", "TextGame-v0=2", "GuessNumber-v0=1", *SMALL, "--eval.episodes", "3"]
    assert main([*options, "--output", str(run), "--json"]) == 0
    printed = capsys.readouterr()
    errors = printed.err
    assert "3 episodes of TextGame-v0 and GuessNumber-v0" in errors
    assert "before TextGame-v0" in errors and "after GuessNumber-v0" in errors
    assert "agentgym eval --env TextGame-v0 --policy" in errors and "agentgym eval --env GuessNumber-v0" in errors
    result = json.loads(printed.out)
    assert {"success_before/TextGame-v0", "success_after/GuessNumber-v0"} < set(result)
    trained = [record.trajectory.task.env_id for record in read_episodes(run) if record.phase == "train"]
    assert sorted(trained) == ["GuessNumber-v0"] * 2 + ["TextGame-v0"] * 4
    (line,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"success/TextGame-v0", "reward_mean/GuessNumber-v0"} < set(line)
    assert main(["verify", str(run)]) == 0 and main(["view", str(run), "--share", str(run / "page.html")]) == 0
    assert main([*options, "--output", str(run), "--resume"]) == 0
    assert main([*options[:2], "TextGame-v0=3", *options[3:], "--output", str(run), "--resume"]) == 2
    assert "practice.mix.TextGame-v0: 2 there, 3 here" in capsys.readouterr().err


def test_a_file_may_give_a_mix_with_keywords_and_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    mix = {"easy": {"env": "TextGame-v0", "kwargs": {"level": 1}, "levels": []}, "GuessNumber-v0": {"levels": [1, 3]}}
    curriculum = {"method": "learnability", "values": [2, 3]}
    practice = {"mix": mix, "curriculum": curriculum, "filter": "reward", "replay": {"share": 0.5}}
    file.write_text(yaml.safe_dump({"tasks": 8, "group_size": 4, "practice": practice}, sort_keys=False))
    assert main(["train", "--config", str(file), "--dry-run"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "environments 2 in the first step 4 of easy, 4 of GuessNumber-v0" in output
    assert "levels of GuessNumber-v0 2 level = 1, 3, by learnability" in output and "levels of easy" not in output
    assert "replayed tasks 4 at most" in output and "most episodes per step 288 groups of equal reward" in output
    assert main(["train", "--config", str(file), "--print-config"]) == 0
    printed = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert main(["train", "--config", str(again), "--print-config"]) == 0
    assert capsys.readouterr().out == printed and yaml.safe_load(printed)["env"] == "TextGame-v0"


def test_a_dry_run_without_practice_settings_prints_nothing_about_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--env", "TextGame-v0", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert not any(word in output for word in ("environments", "levels of", "replayed", "most episodes"))


def test_dapo_leaves_out_groups_of_equal_rewards_unless_it_is_told_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options, expected in ((["dapo"], "reward"), (["dapo", "--practice.filter", "off"], "off"), (["grpo"], "off")):
        assert main(["train", "--env", "TextGame-v0", "--print-config", "--algo", *options]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["practice"]["filter"] == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mix", "TextGame-v0", "GuessNumber-v0=1"], "names with numbers were wanted, such as TextGame-v0=2"),
        (["--mix", "TextGame-v0=1", "TextGame-v0=2"], "different names with numbers"),
        (["--mix", "TextGme-v0=2"], "did you mean 'TextGame-v0'"),
        (["--mix", "TextGame-v0=0"], "the weight of 'TextGame-v0' is a number above 0"),
        (["--mix", "TextGame-v0=1", "--env", "WordLadder-v0"], "env 'WordLadder-v0' is not in the mix"),
        (["--mix", "TextGame-v0=1", "--env-kwargs", "level=1"], "in a mix each has its own"),
        (["--env", "TextGame-v0", "--practice.filter", "rewards"], "invalid choice 'rewards'"),
        (["--env", "TextGame-v0", "--practice.filter", "reward", "--practice.max-refills", "0"], "max_refills must"),
        (["--env", "TextGame-v0", *CURRICULUM[:2]], "two or more different curriculum.values of 'level'"),
        (["--env", "TextGame-v0", *CURRICULUM[2:]], "curriculum.method is off"),
        (["--env", "TextGame-v0", *CURRICULUM[:-1], "9"], "no level 9"),
        (["--env", "TextGame-v0", *CURRICULUM, "--practice.curriculum.by", "lvl"], "does not take the keyword"),
        (["--env", "TextGame-v0", "--practice.replay.share", "1"], "replay.share is a share in [0, 1)"),
        (
            ["--env", "TextGame-v0", "--practice.filter", "reward", "--group-size", "1", "--allow-single"],
            "a group of one always is",
        ),
    ],
)
def test_a_typical_mistake_is_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *args, "--dry-run"]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.startswith("error: ") and "\n" not in error
