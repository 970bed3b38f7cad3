"""Every other command does what its help says."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentgym.cli import env_check
from agentgym.cli.eval import EvalOptions, stored_options
from agentgym.cli.serve import ServeOptions
from agentgym.envs.base.tool_env import UNPAID
from agentgym.envs.catalog import packages
from agentgym.envs.catalog.listing import listed_ids
from agentgym.envs.catalog.plugin import BUNDLED
from agentgym.errors import RunFolderError
from agentgym.rollout import read_episodes

Command = Callable[..., Any]
ORACLE = ("eval", "--env", "TextGame-v0", "--policy", "oracle")
STUCK = '''
from agentgym.envs import ToolEnv
from agentgym.tools import tool


class Stuck(ToolEnv):
    max_turns = 3

    def start(self, options):
        return f"Door {self.np_random.integers(1000)}."

    @tool
    def push(self) -> str:
        """Pushes the door."""
        raise ValueError("It is stuck.")
'''


def test_eval_counts_successes_and_prints_the_path_of_its_episodes(agentgym: Command, tmp_path: Path) -> None:
    done = agentgym(*ORACLE, "-n", 3, "-r", 2, "--env-kwargs", "level=1", "--json")
    assert done.code == 0, done.err
    assert done.json["success"] == 1.0 and done.json["mean_reward"] == 1.0
    assert done.json["num_episodes"] == 6 and done.json["num_tasks"] == 3 and done.json["num_failed"] == 0
    assert 0.0 < done.json["success_interval"][0] < 1.0
    run = tmp_path / done.json["output"]
    assert str(run.relative_to(tmp_path)) in done.text and "Wilson" in done.text
    assert sorted(path.name for path in run.iterdir()) == [
        "config.yaml",
        "digests.json",
        "environments.json",
        "episodes.jsonl",
        "result.json",
        "tools.jsonl",
    ]
    assert json.loads((run / "result.json").read_text()) == done.json


def test_an_environment_is_named_with_or_without_its_option(agentgym: Command) -> None:
    assert agentgym("eval", "TextGame-v0", "--policy", "oracle", "-n", 1, "--json").json["env"] == "TextGame-v0"
    for command in (["play"], ["tools", "list"]):
        spellings = (["WordLadder-v0"], ["--env", "WordLadder-v0"], ["--env=WordLadder-v0"])
        plain, with_option, joined = (agentgym(*command, *words) for words in spellings)
        assert plain == with_option == joined and plain.code == 0
    unknown = agentgym("env", "check", "GuesNumber-v0")
    assert unknown == agentgym("env", "check", "--env", "GuesNumber-v0") and unknown.code == 2


def test_a_second_eval_takes_a_new_folder_and_equal_seeds_give_equal_files(agentgym: Command) -> None:
    folders = [agentgym(*ORACLE, "-n", 2, "--json").json["output"] for _ in range(2)]
    assert folders[0] != folders[1]
    assert Path(folders[0], "episodes.jsonl").read_bytes() == Path(folders[1], "episodes.jsonl").read_bytes()


def test_progress_through_a_pipe_is_a_line_for_each_tenth(agentgym: Command) -> None:
    done = agentgym(*ORACLE, "-n", 40, "--env-kwargs", "level=1")
    assert done.err.count("\n") == 10 and "episodes 40/40 success 1.00" in done.err


def test_failed_episodes_are_counted_named_and_played_again(agentgym: Command) -> None:
    command = ("eval", "--env", "flaky.py:Flaky", "--policy", "random", "-n", 6, "--output", "run")
    done = agentgym(*command, "--json")
    assert done.code == 0 and done.json["failed"] == {"env_error": 2} and done.json["success"] == 1.0
    assert "replay it: agentgym eval --env flaky.py:Flaky --policy random -n 3 --seed 0\n" in done.text
    again = agentgym(*command, "--resume")
    assert "4 of 6 episodes are there already" in again.text


def test_a_success_without_a_reward_is_named_unless_the_reward_comes_from_elsewhere(
    agentgym: Command, tmp_path: Path
) -> None:
    (tmp_path / "unpaid.py").write_text(
        "from agentgym.envs import ToolEnv\n\n\nclass Unpaid(ToolEnv):\n    max_turns = 2\n\n"
        "    def start(self, options):\n        return 'Begin.'\n\n"
        "    def on_message(self, text):\n        self.end(success=True)\n        return 'Well.'\n\n\n"
        "def pay(trajectory):\n    return 0.0\n"
    )
    command = ("eval", "--env", "unpaid.py:Unpaid", "--policy", "random", "-n", 2)
    assert f"2 episodes succeeded and earned nothing. {UNPAID}" in agentgym(*command).text
    assert UNPAID not in agentgym(*command, "--reward.function", "unpaid.py:pay").text


@pytest.mark.parametrize(
    "words",
    [
        ("--env", "flaky.py:Flaky", "--policy", "random", "--seed", 3, "--stop", "</a>", "--max-turns", 2),
        ("--data.eval", "rows.jsonl", "--reward.function", "exact_match", "--policy", "random"),
        ("--env", "TextGame-v0", "--env-kwargs", "level=2", "--policy", "embedded", "--turn-tokens", 4),
    ],
)
def test_resume_and_the_folder_alone_go_on_with_the_settings_of_the_run(
    words: tuple[object, ...], agentgym: Command, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer": "4"}\n')
    assert agentgym("eval", *words, "-n", 2, "--output", "run").code == 0
    whole = {name: Path("run", name).read_bytes() for name in ("config.yaml", "episodes.jsonl", "digests.json")}
    Path("run/episodes.jsonl").write_bytes(whole["episodes.jsonl"].splitlines(keepends=True)[0])
    again = agentgym("eval", "--resume", "--output", "run", "--env-processes", 0)
    assert again.code == 0, again.err
    assert {name: Path("run", name).read_bytes() for name in whole} == whole
    refusal = agentgym("eval", "--resume", "--output", "run", "-n", 3)
    assert refusal.code == 2 and "num_tasks was 2 and is now 3" in refusal.err


def test_the_settings_of_a_served_evaluation_come_back(tmp_path: Path) -> None:
    options = ServeOptions(env="TextGame-v0", num_tasks=3, stop=("a",))
    (tmp_path / "config.yaml").write_text(json.dumps(options.to_json(), default=dict))
    stored = stored_options(ServeOptions, ["--resume", "--output", str(tmp_path)])
    assert stored is not None and stored.to_json() == options.to_json()
    (tmp_path / "config.yaml").write_text("kind: train\nenv: TextGame-v0\n")
    with pytest.raises(RunFolderError, match="is that of another command"):
        stored_options(EvalOptions, ["--resume", "--output", str(tmp_path)])


def test_a_call_that_its_tool_answers_with_an_error_is_a_failed_call(agentgym: Command, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    done = agentgym("eval", "--env", "stuck.py:Stuck", "--policy", "random", "-n", 2, "--json")
    assert done.code == 0 and done.json["num_failed"] == 0, done.err
    assert done.json["tool_errors"] == 6
    row = next(line for line in done.text.splitlines() if line.startswith("failed calls"))
    assert row.split()[2] == "6"


def test_a_run_verifies_and_is_viewed_with_its_own_tokenizer(agentgym: Command) -> None:
    agentgym(*ORACLE, "-n", 2, "--output", "run")
    verified = agentgym("verify", "run", "--json")
    assert verified.code == 0 and verified.json["ok"], verified.out
    assert verified.json["properties"]["prefix"]["num_checked"] > 0
    viewed = agentgym("view", "run", "--share", "run.html", "--json")
    assert viewed.code == 0
    page = Path(viewed.json["page"]).read_text(encoding="utf-8")
    blocks = re.findall(r'<script type="text/plain" id="\w+">([^<]+)</script>', page)
    assert b"<|im_start|>" in b"".join(gzip.decompress(base64.b64decode(block)) for block in blocks)


def test_the_embedded_model_plays_by_default(agentgym: Command) -> None:
    done = agentgym("eval", "--env", "TextGame-v0", "-n", 2, "--output", "run", "--json")
    assert done.code == 0, done.err
    assert done.json["policy"] == "embedded" and done.json["num_episodes"] == 2
    assert agentgym("verify", "run").code == 0


def test_verify_finds_a_changed_token(agentgym: Command) -> None:
    agentgym(*ORACLE, "-n", 2, "--output", "run")
    path = Path("run/episodes.jsonl")
    lines = path.read_text().splitlines()
    record = json.loads(lines[1])
    record["rows"][0]["spans"][1]["ids"][0] += 1
    path.write_text(lines[0] + "\n" + json.dumps(record) + "\n")
    done = agentgym("verify", "run", "--json")
    assert done.code == 1 and not done.json["ok"]
    assert "FAILED" in done.text


def test_envs_and_tools_are_listed(agentgym: Command) -> None:
    envs = agentgym("env", "list", "--json")
    assert [env["id"] for env in envs.json["envs"]] == list(BUNDLED)
    countdown = next(env for env in envs.json["envs"] if env["id"] == "Countdown-v0")
    assert (countdown["version"], countdown["tools"]) == (0, ["answer"])
    assert countdown["difficulty"]["keyword"] == "level" and set(countdown["difficulty"]["values"]) == {"1", "2", "3"}
    assert countdown["card"]["reward_range"] == [0.0, 1.0]
    assert "level=1|2|3" in envs.text
    everything = agentgym("tools", "list", "--json").json["tools"]
    assert {"TextGame-v0", "GuessNumber-v0", "WordLadder-v0"} <= {tool["env"] for tool in everything}
    word_ladder = agentgym("tools", "list", "WordLadder-v0", "--json").json["tools"]
    assert [tool["function"]["name"] for tool in word_ladder] == ["change"]
    assert word_ladder[0]["function"]["parameters"]["required"] == ["word"]


def test_a_new_environment_is_evaluated_like_any_other(agentgym: Command) -> None:
    env = agentgym("new", "env", "number-lock", "--output", "mine", "--json").json["env"]
    assert agentgym("eval", "--env", env, "--policy", "random", "-n", 2, "--json").json["num_episodes"] == 2


def test_check_finds_what_is_wrong(agentgym: Command) -> None:
    done = agentgym("env", "check", "flaky.py:Broken", "--json")
    assert done.code == 1 and not done.json["ok"]
    assert any("the machine fell apart" in finding["message"] for finding in done.json["findings"])


@pytest.mark.long
def test_check_reports_the_result_of_every_check(agentgym: Command) -> None:
    done = agentgym("env", "check", "--env", "GuessNumber-v0", "--env-kwargs", "level=2", "--json")
    assert done.code == 0 and done.json["ok"]
    verdicts = {check["check"]: check["verdict"] for check in done.json["checks"]}
    assert len(verdicts) == done.json["num_checks"] and set(verdicts.values()) == {"passed", "not claimed"}
    assert (verdicts["oracle"], verdicts["fork"], verdicts["baseline"]) == ("passed", "not claimed", "not claimed")
    assert "it has no method fork()" in done.text


def test_check_takes_one_environment_or_all(agentgym: Command) -> None:
    for arguments in ((), ("GuessNumber-v0", "--all")):
        done = agentgym("env", "check", *arguments)
        assert done.code == 2 and "takes one environment, or --all" in done.err


@pytest.mark.slow
def test_check_all_fails_where_the_environment_of_a_package_does(
    agentgym: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "flaky.py").open("a") as module:
        module.write("\n\ndef register():\n    import gymnasium\n")
        module.write("    gymnasium.register(id='Flaky-v0', entry_point='flaky:Broken')\n")
    folder = tmp_path / "flaky-1.0.dist-info"  # what pip writes
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flaky\nVersion: 1.0\nRequires-Dist: agentgym-llm\n")
    (folder / "entry_points.txt").write_text("[gymnasium.envs]\n__root__ = flaky:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    few = ["GuessNumber-v0", "ToolPrompt-v0", "Countdown-v0", "Flaky-v0"]  # the others have tests of their own
    monkeypatch.setattr(env_check, "listed_ids", lambda: [env_id for env_id in listed_ids() if env_id in few])
    try:
        done = agentgym("env", "check", "--all", "--json")
    finally:
        packages._loaded.clear()
        del gymnasium.registry["Flaky-v0"]
    assert done.code == 1 and not done.json["ok"]
    assert [(env["env"], env["ok"]) for env in done.json["envs"]] == [(env_id, env_id != "Flaky-v0") for env_id in few]
    assert "3 of 4 environments passed" in done.text


# ---- in a process of its own


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
from agentgym.cli.main import main
for name in sys.argv[1:]:
    assert main([name, "--env", "TextGame-v0"]) == 2, name
"""


@pytest.mark.long
def test_a_model_without_torch_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "eval", "serve", "train", "sft"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []
    assert done.stderr.splitlines() == [
        f"error: {what} needs torch, which is not installed: `agentgym doctor` shows the command"
        for what in ("a model", "a model", "train", "sft")
    ]


def spawn(folder: Path, *args: object, **settings: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "agentgym", *map(str, args)]
    return subprocess.Popen(command, cwd=folder, **{**pipes, **settings})


def wait_for_lines(path: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_bytes().splitlines()) < number:
        assert time.monotonic() < deadline, "the command wrote too little"
        time.sleep(0.02)


@pytest.fixture
def slow(agentgym: Command, tokenizer_folder: Path) -> tuple[object, ...]:
    command = ("eval", "--env", "flaky.py:Slow", "--policy", "random", "-n", 30, "--concurrency", 2)
    return (*command, "--tokenizer", tokenizer_folder, "--output", "run")


def ignore_sigint() -> None:
    """A shell without job control does this to its background jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.long
@pytest.mark.parametrize(
    "stop", [signal.SIGTERM, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (signal.SIGINT, signal.SIGKILL))]
)
def test_a_stopped_evaluation_loses_nothing_and_goes_on(
    stop: signal.Signals, slow: tuple[object, ...], agentgym: Command, tmp_path: Path
) -> None:
    ignored = {"preexec_fn": ignore_sigint} if stop is signal.SIGTERM else {}
    process = spawn(tmp_path, *slow, **ignored)
    wait_for_lines(tmp_path / "run" / "episodes.jsonl", 4)
    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    if stop is not signal.SIGKILL:
        assert process.returncode == (130 if stop is signal.SIGINT else 143)
        assert "interrupted; finished episodes are in run" in err and "Traceback" not in err
    num_kept = len((tmp_path / "run" / "episodes.jsonl").read_bytes().splitlines())
    done = agentgym(*slow, "--resume", "--json")
    assert done.code == 0 and done.json["num_episodes"] == 30
    assert f"{num_kept} of 30 episodes are there already" in done.text or num_kept > 4
    whole = agentgym(*slow[:-1], "whole", "--concurrency", 30, "--json")
    assert whole.code == 0
    assert Path("run/episodes.jsonl").read_bytes() == Path("whole/episodes.jsonl").read_bytes()


@pytest.mark.long
def test_a_full_disk_is_one_line(tmp_path: Path, tokenizer_folder: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = (*ORACLE, "-n", 20, "--tokenizer", tokenizer_folder, "--output", "run")
    process = spawn(tmp_path, *command, preexec_fn=small_files)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert [line for line in err.splitlines() if not line.startswith("episodes ")] == [
        "error: cannot write episodes.jsonl in the run folder 'run': [Errno 27] File too large"
    ]
    for line in (tmp_path / "run" / "episodes.jsonl").read_bytes().splitlines():
        assert json.loads(line)["status"] == "completed"


LOUD = """
class Loud(TextEnv):
    max_turns = 1

    def reset(self, *, seed=None, options=None):
        return f"Task {seed}", {}

    def step(self, action):
        print("stepped")
        return "", 1.0, True, False, {}
"""


def test_help_and_mistakes_of_train_need_no_torch(tmp_path: Path) -> None:
    mistakes = [
        ["train", "--env", "TextGame-v0", *args.split()] for args in ("--stesp 3", "--steps three", "--steps 0")
    ]
    code = (
        "import contextlib, sys\nfrom agentgym.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['train', '--help'])\n"
        f"for words in {mistakes!r}: assert main(words) == 2 and 'torch' not in sys.modules, words"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("option", ["", "--json"])
def test_a_closed_pipe_is_no_error(option: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m agentgym tools list {option} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "rror" not in done.stderr


@pytest.mark.long
def test_what_an_environment_prints_is_not_among_the_json(tmp_path: Path) -> None:
    code = "from agentgym import TextEnv\nprint('loaded')\n" + LOUD
    (tmp_path / "loud.py").write_text(code, encoding="utf-8")
    words = [sys.executable, "-m", "agentgym", "eval", "loud.py:Loud", "--policy", "random", "-n", "2", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["success"] is not None and done.stdout.count("\n") == 1
    assert "loaded" in done.stderr and "stepped" in done.stderr


@pytest.mark.long
def test_no_command_loads_what_it_does_not_need(tmp_path: Path, tokenizer_folder: Path) -> None:
    evaluation = [*ORACLE, "-n", "1", "--tokenizer", str(tokenizer_folder)]
    commands = [["--help"], ["env", "list"], ["tools", "list"], ["play", "TextGame-v0"], evaluation]
    code = (
        "import sys\nfrom agentgym.cli.main import main\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'ray', 'safetensors'}\n"
        f"for words in {commands!r}:\n"
        "    assert main(words) == 0, words\n"
        "    found = [n for n in sys.modules if n in heavy or n.startswith('agentgym.trainers')]\n"
        "    assert not found, (words, found)"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_repeats_show_pass_at_k_and_failed_episodes_are_left_out(
    agentgym: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = agentgym("eval", "TextGame-v0", "--policy", "random", "-n", 6, "-r", 5, "--output", "out", "--json")
    assert done.code == 0, done.err
    (scores,) = done.json["at_k"]
    assert (scores["env"], scores["num_tasks"], scores["num_episodes"]) == ("TextGame-v0", 6, 30)
    assert [at["k"] for at in scores["k"]] == [1, 2, 4, 5]
    assert scores["k"][0]["pass_at_k"] == pytest.approx(done.json["success"])
    assert "pass@k" in done.text and "TextGame-v0: 6" in done.text
    low, high = scores["k"][-1]["pass_at_k_interval"]
    assert f"{scores['k'][-1]['pass_at_k']:.3f} [{low:.3f}, {high:.3f}]" in done.text
    broken = agentgym("eval", "flaky.py:Flaky", "--policy", "random", "-n", 6, "-r", 2, "--json")
    (scores,) = broken.json["at_k"]
    assert (scores["num_episodes"], scores["num_failed"], scores["k"][1]["num_short"]) == (8, 4, 2)
    assert "tasks with fewer episodes: 2" in broken.text
    once = agentgym("eval", "TextGame-v0", "--policy", "random", "-n", 2, "--json")
    assert "pass@k" not in once.text and [at["k"] for at in once.json["at_k"][0]["k"]] == [1]


def test_the_episodes_of_a_run_are_lines_or_a_table(agentgym: Command, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    assert agentgym(*ORACLE, "-n", 3, "-r", 2, "--env-kwargs", "level=1", "--output", "run").code == 0
    lines = Path("run/episodes.jsonl").read_text()
    assert agentgym("episodes", "run").out == lines
    assert agentgym("episodes", "run", "copy.jsonl").code == 0 and Path("copy.jsonl").read_text() == lines
    assert agentgym("episodes", "run", "all.parquet", "--json").json == {"file": "all.parquet", "episodes": 6}
    rows = pyarrow.read_table("all.parquet").to_pylist()
    records = [record.trajectory for record in read_episodes("run")]
    assert [row["reward"] for row in rows] == [episode.reward for episode in records]
    assert [row["ids"] for row in rows] == [[own.ids.tolist() for own in episode.rows] for episode in records]
    assert [row["mask"] for row in rows] == [[own.mask.tolist() for own in episode.rows] for episode in records]
    assert [message["role"] for message in rows[0]["messages"]][:3] == ["system", "user", "assistant"]
    assert rows[0]["num_tokens"] == records[0].num_tokens and rows[0]["advantages"] is None


def test_mistakes_with_episodes_are_named_and_leave_no_file(agentgym: Command, tmp_path: Path) -> None:
    assert agentgym(*ORACLE, "-n", 1, "--env-kwargs", "level=1", "--output", "run").code == 0
    for words, message in (
        (["absent"], "holds no episodes"),
        (["run", "all.csv"], "a file .jsonl or .parquet was wanted"),
        (["run", "no/all.parquet"], "cannot write"),
        (["run", "--json"], "name one"),
    ):
        done = agentgym("episodes", *words)
        assert done.code == 2 and message in done.err
    Path("run/episodes.jsonl").write_text("[1]\n")
    assert agentgym("episodes", "run", "all.jsonl").code == 2
    assert not [path for path in tmp_path.iterdir() if "all." in path.name]
