"""A mistake is answered by one line on standard error, which says what was meant, and by exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import COMMANDS

Command = Callable[..., Any]
MISTAKES = {
    "evl --env TextGame-v0": "unknown command 'evl': did you mean 'eval'?",
    "--vrsion": "unknown option '--vrsion'",
    "eval --env TextGame-v0 --model embedded": "did you mean '--policy'?",
    "train --env TextGame-v0 --policy embedded": "did you mean '--model'?",
    "play TextGame-v0 --level 2": "a keyword of the environment is written '--env-kwargs level=...'",
    "train --env TextGame-v0 --algo gpro": "did you mean 'grpo'?",
    "env check flaky.py": "'flaky.py' is a file: name the class in it too, as in 'flaky.py:Class'",
    "tools call flaky.py:Flaky look": "Flaky is an environment, and no tool: `agentgym play` calls its tools",
    "env": "agentgym env takes a command: list, check, serve, export, new",
    "env lst": "unknown command 'agentgym env lst': did you mean 'list'?",
    "env check TextGme-v0": "did you mean 'TextGame-v0'?",
    "eval --env TextGame-v0 --polcy oracle": "unknown option '--polcy': did you mean '--policy'?",
    "eval --polcy oracle": "unknown option '--polcy': did you mean '--policy'?",
    "eval": "missing --env",
    "train --env TextGame-v0 --batch-size 5": "unknown option '--batch-size': did you mean '--tasks'?",
    "train --env TextGame-v0 --max-tokens 5": "did you mean '--limits.turn-tokens'?",
    "train --env TextGame-v0 --eval-every 5": "did you mean '--eval.every'?",
    "train --env TextGame-v0 --evaluation.num-tasks 5": "did you mean a setting such as '--eval.episodes'?",
    "eval --resume": "--resume goes on in a run's folder: name it with --output",
    "eval --resume --output nowhere": "'nowhere' holds no run to go on with: it has no config.yaml",
    "serve --resume --output nowhere": "'nowhere' holds no run to go on with: it has no config.yaml",
    "train --env TextGame-v0 --optimizer.name lion": "`agentgym algorithms list` shows all but adamw and muon",
    "verify --model embedded": "`agentgym models check FOLDER` checks a model",
    "eval --temperatur 1 --env TextGame-v0": "did you mean '--temperature'?",
    "eval --env TextGame-v0 --reward mine.py:mine": "'--reward': settings of reward have names of their own, such as",
    "eval --data rows.parquet": "'--data': settings of data have names of their own, such as '--data.train'",
    "new envirnment lock": "unknown command 'agentgym new envirnment': did you mean 'env'?",
    "new foo": "command 'agentgym new foo': it has env, tool, reward, sampler, optimizer, engine, renderer, algorithm",
    "eval --env TextGame-v0 -n many": "-n/--num-tasks: a number was wanted, got 'many'",
    "eval --env TextGame-v0 -n": "Missing value for argument '-n/--num-tasks'",
    "eval --env TextGame-v0 --policy oracle -n 0": "num_tasks must be at least 1, got 0",
    "eval --env TextGame-v0 --policy oracle -r -1": "num_repeats must be at least 1, got -1",
    "eval --env TextGame-v0 --temperature -1": "temperature must be at least 0",
    "eval --env NoSuch-v0 --policy oracle": "unknown env 'NoSuch-v0'. `agentgym env list` shows all",
    "eval --env TextGme-v0 --policy oracle": "did you mean 'TextGame-v0'?",
    "eval --env TextGame-v0 --policy orcale": "did you mean 'oracle'?",
    "eval --env TextGame-v0 --policy ./no/model": "no policy and no model folder './no/model'",
    "eval --env TextGame-v0 --policy oracle --resume": "--output",
    "eval --env TextGame-v0 --policy oracle --output taken": "'taken' holds",
    "eval --env TextGame-v0 --policy oracle --output flaky.py": "is a file; --output takes a folder",
    "eval --env TextGame-v0 --policy oracle --output /proc/run": "cannot write in the run folder",
    "eval --env TextGame-v0 --policy oracle --env-kwargs level": "NAME=VALUE was wanted",
    "play TextGame-v0 --env-kwargs level=1 --env-kwargs shaped=true": "--env-kwargs is given twice",
    "eval --env flaky.py:Flaky --policy oracle": "Flaky has no oracle policy",
    "play": "missing ENV",
    "play TextGame-v0 quickly": "unexpected argument 'quickly'",
    "play TextGame-v0 --env-kwargs level=9": "TextGame has no level 9",
    "play TextGame-v0 --env-kwargs lvl=2": "keyword 'lvl': did you mean 'level'? It takes: level, shaped",
    "play flaky.py:Flacky": "did you mean 'Flaky'?",
    "play nothing.py:Flaky": "no file 'nothing.py'",
    "env new 7up": "'7up' cannot name an environment",
    "new": "agentgym new takes a command: env, tool, reward, sampler, optimizer, engine, renderer, algorithm",
    "new algoritm x": "did you mean 'algorithm'?",
    "new tool": "missing NAME",
    "new algorithm mine --kind los": "invalid choice 'los'",
    "tools call nothing": "unknown tool 'nothing'",
    "tools call flaky.py:Flacky": "has no tool 'Flacky': did you mean 'Flaky'?",
    "train --env TextGame-v0 --algo flaky.py:Flaky": "advantage estimator 'flaky.py:Flaky' takes",
    "train --env TextGame-v0 --algo flaky.py": "'flaky.py' names no advantage estimator",
    "train --env TextGame-v0 --learner.loss flaky.py:Flacky": "did you mean 'Flaky'?",
    "train --env TextGame-v0 --learner.kl.penalty nothing.py:x": "no file 'nothing.py'",
    "train --env TextGame-v0 --aggregation flaky:Flaky": "aggregation 'flaky:Flaky' takes",
    "tools list TextGme-v0": "did you mean 'TextGame-v0'?",
    "verify nowhere": "nowhere is not a folder",
    "verify taken": "taken has no episodes.jsonl",
    "view nowhere": "nowhere does not exist",
    "view taken": "a run folder with episodes.jsonl or metrics.jsonl was wanted",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(line: str, agentgym: Command, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    before = sorted(tmp_path.rglob("*.jsonl"))
    done = agentgym(*line.split())
    assert done.code == 2
    assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    assert MISTAKES[line] in done.err
    assert sorted(tmp_path.rglob("*.jsonl")) == before and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("doctor", "fake-server")])
def test_a_command_without_arguments_works_or_names_what_it_needs_in_one_line(command: str, agentgym: Command) -> None:
    done = agentgym(command)
    assert (done.code == 0 and not done.err) or (done.code == 2 and done.err.count("\n") == 1), done.err


def test_no_command_shows_all_commands(agentgym: Command) -> None:
    done = agentgym()
    assert done.code == 2
    assert "usage: agentgym COMMAND" in done.out and "eval" in done.out


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize(
    "command",
    ["", "eval", "play", "env", "env list", "env check", "env export", "env new", "new", "new tool", "tools", "view"],
)
def test_help_is_there_for_every_command(command: str, flag: str, agentgym: Command) -> None:
    done = agentgym(*command.split(), flag)
    assert done.code == 0 and done.err == ""
    assert done.out.startswith("usage: agentgym")


@pytest.mark.parametrize(
    ("command", "replay"),
    [
        ("play flaky.py:Flaky --seed 3", "agentgym play flaky.py:Flaky --seed"),
        (
            "eval --env flaky.py:Broken --policy random -n 4",
            "agentgym eval --env flaky.py:Broken --policy random -n 1 --seed",
        ),
    ],
)
def test_an_environments_error_ends_with_what_replays_it(command: str, replay: str, agentgym: Command) -> None:
    done = agentgym(*command.split(), typed="hello\n")
    assert done.code == 1
    assert done.err.count("Traceback") == 1
    assert 'flaky.py", line' in done.err and "agentgym/cli" not in done.err
    last = done.err[done.err.index("Traceback") :].rpartition("error: ")[2]
    assert replay in last


def test_a_users_algorithm_that_raises_shows_its_own_traceback_alone(agentgym: Command, tmp_path: Path) -> None:
    text = "def never(rewards_BT, mask_BT):\n    raise ValueError('not today')\n"
    (tmp_path / "torn.py").write_text(text, encoding="utf-8")
    done = agentgym("train", "--env", "TextGame-v0", "--algo", "torn.py:never")
    assert done.code == 1 and not (tmp_path / "runs").exists()
    assert done.err.count("Traceback") == 1 and 'torn.py", line 2' in done.err and "agentgym/" not in done.err
    last = "error: the advantage estimator 'torn.py:never' failed: ValueError: not today"
    assert done.err.splitlines()[-1] == last


def test_a_policy_that_cannot_be_made_is_the_users_error(agentgym: Command, tmp_path: Path) -> None:
    file = tmp_path / "planless.py"
    oracle = "class Planless(Flaky):\n    def make_oracle(self):\n        raise KeyError('plan')\n"
    file.write_text((tmp_path / "flaky.py").read_text(encoding="utf-8") + oracle, encoding="utf-8")
    done = agentgym("eval", "--env", "planless.py:Planless", "--policy", "oracle")
    assert done.code == 1 and not (tmp_path / "runs").exists()
    assert "the oracle policy of planless.py:Planless cannot be made: KeyError: 'plan'" in done.err


def test_a_module_that_does_not_load_shows_its_own_traceback_alone(agentgym: Command, tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("import json\njson.loads('{')\n", encoding="utf-8")
    for command in ("play torn.py:Env", "env check torn.py:Env", "tools list torn.py:Env"):
        done = agentgym(*command.split())
        assert done.code == 1
        assert done.err.count("Traceback") == 1 and 'torn.py", line 2' in done.err
        assert done.err.splitlines()[-1].startswith("error: torn.py:Env cannot be ")
    for place in ("torn.py", "torn"):
        done = agentgym("train", "--env", "TextGame-v0", "--algo", f"{place}:mine")
        assert done.code == 1 and done.err.count("Traceback") == 1 and "KeyError" not in done.err
        assert done.err.splitlines()[1].endswith('torn.py", line 2, in <module>')
        assert f"error: {place}:mine cannot be loaded" in done.err


ENDING = """
import atexit
from agentgym.cli.main import _leave
atexit.register(_leave, [0])
print("kept until the end")
"""


def test_output_that_cannot_be_written_at_the_end_is_no_success() -> None:
    command = [sys.executable, "-c", ENDING]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    assert subprocess.run(command, stdout=subprocess.PIPE, env=env, check=True).stdout == b"kept until the end\n"
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=env, text=True, check=False)
    assert done.returncode
    assert "No space left on device" in done.stderr
