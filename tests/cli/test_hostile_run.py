"""The commands that read a run of a stranger, whose settings name code and addresses."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from agentgym.embedded import embedded_folder
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.rollout.record.manifest import write_manifest
from agentgym.trainers.checkpoints.sharded_state import save_state
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

Command = Callable[..., Any]
CODE = "from pathlib import Path\nPath('executed').touch()\n"
SETTINGS = {
    "algo": "evil.py:algo",
    "env": "evil.py:Env",
    "model_backend": "evil.py:Model",
    "family": "evil.py:renderer",
    "reward": {"function": "evil.py:reward"},
    "data": {"train": ["evil.py:rows"], "generator": "evil.py:rows"},
    "tools": ["evil.py:tool"],
    "rollout": {"loop": "evil.py:loop"},
}
CHECKPOINT = "run/checkpoints/step-000001"
READERS = [
    ("view", "run", "--share", "run.html"),
    ("verify", "run"),
    ("models", "check", CHECKPOINT, "--only", "template"),
    ("episodes", "run", "out.jsonl"),
    ("episodes", "run", "out.parquet"),
    ("rescore", "run", "--reward.function", "exact_match"),
    ("compare", "run", "run"),
    ("export", "run", "out"),
    ("export", CHECKPOINT, "out"),
    ("export", "run", "out", "--adapter"),
    ("eval", "--env", "GuessNumber-v0", "--policy", CHECKPOINT, "-n", "1"),
    ("serve", "--env", "GuessNumber-v0", "--policy", CHECKPOINT),
    ("generate", "--model", CHECKPOINT, "--input", "prompts.jsonl", "--output", "replies.jsonl"),
    ("sft", "--episodes", "run", "--model", CHECKPOINT, "--steps", "1", "--output", "taught"),
    ("dpo", "--episodes", "run", "--model", CHECKPOINT, "--steps", "1", "--output", "taught"),
    ("plan", "--model", CHECKPOINT),
    ("train", "--env", "GuessNumber-v0", "--model", CHECKPOINT, "--dry-run"),
]


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a server that nobody may call: an open connection is an error of the test."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/model"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.fixture
def run(agentgym: Command, address: str) -> Path:
    Path("evil.py").write_text(CODE)
    Path("prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    folder = Path("run")
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, "model": address}))
    spans = (TokenSpan((1,), Source.PROMPT), TokenSpan((2,), Source.POLICY, (-0.5,), (0,)))
    turns = (Turn(Message("assistant", "red"), 1.0),)
    with EpisodeWriter(folder) as writer:
        for seed in range(2):
            task, rows = Task("Ask-v0", seed, {"ground_truth": "red"}), (Row(spans),)
            writer.write([Trajectory(task, str(seed), 0, rows, turns, Status.COMPLETED, StopReason.TERMINATED)])
    shutil.copytree(embedded_folder(), CHECKPOINT)
    state = {"step": 1, "tasks": {}, "random": {}}
    Path(CHECKPOINT, "state.json").write_text(json.dumps(state))
    save_state({"optimizer": {}, "steps": torch.zeros(1)}, Path(CHECKPOINT, "learner"))
    write_manifest(Path(CHECKPOINT), {"step": 1})
    return folder


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """`file_limit(n)` makes writes fail after `n` bytes of a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_no_command_that_reads_a_run_runs_its_code_or_calls_its_address(
    agentgym: Command, run: Path, words: tuple[str, ...]
) -> None:
    done = agentgym(*words)
    assert done.code in (0, 1, 2) and "Traceback" not in done.err
    assert not Path("executed").exists(), done.err


@pytest.mark.parametrize("words", [("run",), (CHECKPOINT,)])
def test_an_export_runs_the_code_of_a_run_only_if_it_is_trusted(
    agentgym: Command, run: Path, words: tuple[str, ...]
) -> None:
    refused = agentgym("export", *words, "out")
    assert refused.code == 2 and "model_backend 'evil.py:Model'" in refused.err and "--trust-run-code" in refused.err
    assert refused.err.count("\n") == 1 and not Path("out").exists() and not Path("executed").exists()
    agentgym("export", *words, "out", "--trust-run-code")
    assert Path("executed").exists()


def test_a_run_is_shown_and_verified_without_its_model(agentgym: Command, run: Path, address: str) -> None:
    assert agentgym("verify", "run").err == ""
    (run / "config.yaml").write_text(yaml.safe_dump({"model": address}))
    for model in (address, "owner/not-cached", "gone/away"):
        (run / "config.yaml").write_text(yaml.safe_dump({"model": model}))
        view = agentgym("view", "run", "--share", "run/report.html")
        assert view.code == 0 and model in view.out and "--tokenizer FOLDER" in view.out
        assert (run / "report.html").is_file()
        checked = agentgym("verify", "run")
        assert checked.code == 0 and f"{model!r}" in checked.out, checked.err
    assert agentgym("view", "run", "--share", "run.html", "--tokenizer", "gone/away").code == 2


@pytest.mark.parametrize(
    "settings", ["a: " + "[" * 200_000, "a: &a {b: *a}", "a: !!int ''", "a: " + "9" * 5000, "\x00"]
)
@pytest.mark.parametrize("command", ["view", "verify", "export", "rescore"])
def test_settings_that_are_no_yaml_are_one_line(agentgym: Command, run: Path, settings: str, command: str) -> None:
    (run / "config.yaml").write_text(settings)
    words = {"export": ("out",), "view": ("--share", "run.html"), "rescore": ("--reward.function", "exact_match")}.get(
        command, ()
    )
    done = agentgym(command, "run", *words)
    assert done.code == 2 and done.err.count("\n") == 1 and "config.yaml" in done.err and len(done.err) < 600


def test_an_export_to_a_full_disk_is_one_line_and_leaves_nothing(
    agentgym: Command, run: Path, file_limit: Callable[[int], None]
) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump({"algo": "grpo"}))
    before = {path.name for path in Path().iterdir()}
    file_limit(100_000)
    done = agentgym("export", "run", "out")
    assert done.code == 2 and done.err.startswith("error: cannot write the model to") and done.err.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == before
    file_limit(resource.RLIM_INFINITY)
    assert agentgym("export", "run", "out").code == 0


@pytest.mark.long
def test_commands_that_write_one_file_at_once_leave_a_whole_one(agentgym: Command, run: Path) -> None:
    Path("a.yaml").write_text("data: {train_batch_size: 8}")
    words = [("episodes", "run", "out.jsonl"), ("import", "verl", "a.yaml", "--output", "out.yaml")]
    words += [("rescore", "run", "--reward.function", "exact_match", "--output", "scored")]
    for command in words:
        call = [sys.executable, "-c", "from agentgym.cli.main import run; run()", *command]
        both = [subprocess.Popen(call, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        outcomes = [(process.communicate(timeout=120)[1], process.returncode) for process in both]
        assert {code for _, code in outcomes} <= {0, 2} and 0 in {code for _, code in outcomes}, outcomes
        assert all(error.count("\n") == 1 and "Traceback" not in error for error, code in outcomes if code), outcomes
    assert Path("out.jsonl").read_bytes() == (run / "episodes.jsonl").read_bytes()
    assert agentgym("compare", "scored", "scored").code in (0, 2) and agentgym("verify", "scored").code == 0
    assert not [path for path in Path().glob(".*") if path.suffix in (".yaml", ".jsonl")]
