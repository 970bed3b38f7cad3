"""A run's copy at an address: what is sent, what a failure leaves, and that another machine goes on from it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from agentgym.cli.main import main
from agentgym.errors import ConfigError, RunFolderError
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trainers.checkpoints.checkpoint import newest_whole
from agentgym.trainers.checkpoints.run_copy import INDEX, RECORDS, RunCopy, fetch_missing_run

TRAIN = (
    "train --env TextGame-v0 --env-kwargs level=1 --tasks 2 --group-size 4 --eval.episodes 0 --checkpoint.every 1"
    " --optimizer.learning-rate 1e-3"
).split()


class FailingFiles(MemoryFileSystem):
    """Files in memory, of which a number may be opened for writing."""

    protocol = "failing"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    left = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("failing://", "memory://")))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            if not FailingFiles.left:
                raise ConnectionResetError("the network is gone")
            FailingFiles.left -= 1
        return super()._open(path, mode, **options)


@pytest.fixture
def failing() -> Iterator[type[FailingFiles]]:
    fsspec.register_implementation("failing", FailingFiles, clobber=True)
    FailingFiles.store.clear()
    FailingFiles.pseudo_dirs[:] = ["", "/bucket"]
    FailingFiles.left = 10**6
    yield FailingFiles
    FailingFiles.store.clear()


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "report.html", "curve.png")
    }


def cut_after(run: Path, step: int) -> None:
    """Makes of a finished run what it was after a step, with the beginning of the next one's lines."""
    (run / "digests.json").unlink()
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:step]))


def test_a_run_is_the_same_after_it_was_sent_and_fetched(finished_run: Path, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/copy"
    copy = RunCopy(finished_run, address)
    copy.begin(is_new=True)
    copy.send()
    assert fetch_missing_run(tmp_path / "run", address)
    assert files_of(tmp_path / "run") == files_of(finished_run)
    assert verify_run(tmp_path / "run").ok
    assert not fetch_missing_run(tmp_path / "run", address) and not fetch_missing_run(tmp_path / "other", None)


def test_lines_are_sent_once_and_deleted_checkpoints_go(finished_run: Path, tmp_path: Path) -> None:
    run, remote = shutil.copytree(finished_run, tmp_path / "run"), tmp_path / "copy"
    last = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-1]
    whole = shutil.copytree(run, tmp_path / "whole")
    cut_after(run, 1)
    copy = RunCopy(run, f"file://{remote}")
    copy.begin(is_new=True)
    copy.send()
    times = {path: path.stat().st_mtime_ns for path in remote.rglob("*") if path.is_file() and path.name != INDEX}
    for path in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    shutil.copytree(whole, run, dirs_exist_ok=True)
    shutil.rmtree(run / "checkpoints/step-000001")
    copy.send()
    assert {path.parent.name for path in (remote / "checkpoints").glob("*/manifest.json")} == {"step-000002"}
    assert not any(path.is_file() for path in (remote / "checkpoints/step-000001").rglob("*"))
    pieces = json.loads((remote / INDEX).read_text())["pieces"]["metrics.jsonl"]
    assert [(remote / piece).read_bytes() for piece in pieces[1:]] == [last]
    assert all(path.stat().st_mtime_ns == time for path, time in times.items() if path.name.startswith(RECORDS))
    fetch_missing_run(tmp_path / "fetched", f"file://{remote}")
    assert files_of(tmp_path / "fetched") == files_of(run)
    times = {path: path.stat().st_mtime_ns for path in (remote / "checkpoints").rglob("*.safetensors")}
    later = RunCopy(run, f"file://{remote}")  # of a process that resumed the run
    later.begin(is_new=False)
    later.send()
    assert times and all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert all(len(pieces) == 1 for pieces in json.loads((remote / INDEX).read_text())["pieces"].values())
    assert fetch_missing_run(tmp_path / "again", f"file://{remote}")
    assert files_of(tmp_path / "again") == files_of(run)


def test_whenever_it_fails_the_copy_is_of_a_whole_checkpoint_and_its_steps(
    finished_run: Path, tmp_path: Path, failing: type[FailingFiles], caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    cut_after(run, 1)
    copy = RunCopy(run, "failing://bucket/run")
    copy.begin(is_new=True)
    copy.send()
    shutil.copytree(finished_run, run, dirs_exist_ok=True)
    steps: set[int] = set()
    for number in range(40):
        failing.left = number  # files that still arrive
        caplog.clear()
        copy.send()
        fetched = tmp_path / f"fetched{number}"
        assert fetch_missing_run(fetched, "failing://bucket/run")
        newest = newest_whole(fetched)
        assert newest is not None
        steps.add(newest.step)
        assert len((fetched / "metrics.jsonl").read_text().splitlines()) >= newest.step
        assert max(record.step for record in read_episodes(fetched)) >= newest.step
        shutil.rmtree(fetched)
        if failing.left:
            break
        assert "the network is gone" in caplog.text and "--resume, tries again" in caplog.text
    assert steps == {1, 2} and not caplog.text


def test_a_copy_of_another_run_is_never_replaced(finished_run: Path, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/copy"
    RunCopy(finished_run, address).begin(is_new=True)  # nothing to resume from is there
    copy = RunCopy(finished_run, address)
    copy.begin(is_new=True)
    copy.send()
    before = files_of(tmp_path / "copy")
    with pytest.raises(RunFolderError, match=r"already holds a run: go on with --resume"):
        RunCopy(finished_run, address).begin(is_new=True)
    other_run = shutil.copytree(finished_run, tmp_path / "other")
    (other_run / "config.yaml").write_text((other_run / "config.yaml").read_text() + "# other\n")
    with pytest.raises(RunFolderError, match="holds another run than"):
        RunCopy(other_run, address).begin(is_new=False)
    RunCopy(finished_run, address).begin(is_new=False)
    assert files_of(tmp_path / "copy") == before


def test_what_cannot_be_opened_or_read_is_one_line(tmp_path: Path, failing: type[FailingFiles]) -> None:
    with pytest.raises(ConfigError, match=r"'nothing://a' cannot be opened: Protocol not known"):
        RunCopy(tmp_path, "nothing://a")
    with pytest.raises(RunFolderError, match="holds no run, and neither does 'file://"):
        fetch_missing_run(tmp_path / "run", f"file://{tmp_path}/none")
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(RunFolderError, match=r"copy.json of .* is torn"):
        fetch_missing_run(tmp_path / "run", f"file://{tmp_path}")
    (tmp_path / "config.yaml").write_text("algo: grpo")
    failing.left = 0
    with pytest.raises(RunFolderError, match="cannot write 'failing://bucket': ConnectionResetError"):
        RunCopy(tmp_path, "failing://bucket").begin(is_new=True)


def test_an_address_that_cannot_be_written_ends_the_command_before_any_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = [*TRAIN, "--output", str(tmp_path / "run"), "--checkpoint.copy-to", f"file://{tmp_path}/file/run"]
    assert main(words) == 2
    assert "error: cannot " in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_run_goes_on_elsewhere_with_the_bytes_of_an_uninterrupted_one(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/copy"
    assert main([*TRAIN, "--steps", "3", "--output", str(tmp_path / "whole")]) == 0
    copied = ["--checkpoint.copy-to", address]
    assert main([*TRAIN, *copied, "--steps", "2", "--output", str(tmp_path / "first")]) == 0
    shutil.rmtree(tmp_path / "first")
    assert main(["train", "--resume", "--output", str(tmp_path / "second"), *copied, "--steps", "3"]) == 0
    for name in ("episodes.jsonl.zst", "checkpoints/step-000003/model.safetensors"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert fetch_missing_run(tmp_path / "third", address)
    assert files_of(tmp_path / "third") == files_of(tmp_path / "second")


@pytest.mark.adapter
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_a_run_is_copied_to_s3_resumed_from_it_and_plays_as_a_model_there(tmp_path: Path) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        environ = {**os.environ, **keys, "AWS_ENDPOINT_URL": f"http://{host}:{port}", "XDG_CACHE_HOME": str(tmp_path)}

        def agentgym(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "agentgym", *words]
            return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)

        copied = ["--checkpoint.copy-to", "s3://bucket/runs/first"]
        refused = agentgym(*TRAIN, *copied, "--steps", "1", "--output", str(tmp_path / "none"))
        assert refused.returncode == 2 and "error: cannot write 's3://bucket/runs/first'" in refused.stderr
        row = json.dumps({"prompt": "What is 1 + 1?", "ground_truth": "2"})
        script = "import s3fs; files = s3fs.S3FileSystem(); files.mkdir('bucket')"
        script += f"; files.pipe_file('bucket/rows/a.jsonl', {row.encode()!r})"
        subprocess.run([sys.executable, "-c", script], env=environ, check=True, timeout=60)
        first = agentgym(*TRAIN, *copied, "--steps", "2", "--output", str(tmp_path / "first"))
        assert first.returncode == 0, first.stderr
        files = files_of(tmp_path / "first")
        shutil.rmtree(tmp_path / "first")
        second = agentgym("train", "--resume", "--output", str(tmp_path / "second"), *copied, "--steps", "2")
        assert second.returncode == 0, second.stderr
        assert files_of(tmp_path / "second") == files
        policy = "s3://bucket/runs/first/checkpoints/step-000002"
        played = agentgym("eval", "--env", "TextGame-v0", "--policy", policy, "--num-tasks", "4")
        assert played.returncode == 0, played.stderr
        rows = ["--data.eval", "s3://bucket/rows/*.jsonl", "--reward.function", "exact_match"]
        process = agentgym("eval", *rows, "--policy", policy, "--num-tasks", "1", "--turn-tokens", "8")
        assert process.returncode == 0, process.stderr
    finally:
        server.stop()
