"""`agentgym sandbox run`: output as it was, the program's exit code, and why it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, list[str]]]:
    """`run(code, *options)`: exit code, standard output, lines of standard error."""

    def call(code: str, *options: str, name: str = "program.py") -> tuple[int, str, list[str]]:
        path = tmp_path / name
        path.write_text(code, encoding="utf-8")
        exit_code = main(["sandbox", "run", str(path), *options])
        output = capfd.readouterr()
        return exit_code, output.out, output.err.splitlines()

    return call


@pytest.mark.parametrize("backend", ["namespaces", "landlock", pytest.param("docker", marks=pytest.mark.docker)])
def test_output_and_exit_code_are_the_programs(run: Any, backend: str, request: pytest.FixtureRequest) -> None:
    if backend == "docker":
        request.getfixturevalue("docker_address")
    code, out, err = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", "--backend", backend)
    assert (code, out, err[0]) == (3, "out\n", "err")
    assert err[-1].startswith("ended: exited, exit code 3, ") and err[-1].endswith(f"in {backend}")


def test_a_time_limit_and_a_signal_have_the_exit_codes_of_a_shell(run: Any) -> None:
    assert run("while True: pass", "--time-limit-s", "0.3")[0] == 124
    assert run("import os; os.abort()")[0] == 128 + 6
    assert run("while True: print('x' * 1000)")[0] == 137


def test_a_shell_script_is_told_by_its_name(run: Any) -> None:
    assert run("echo $((6 * 7))", name="script.sh")[:2] == (0, "42\n")


def test_json_is_the_last_line(run: Any) -> None:
    code, out, _ = run("print('out', end='')\n1/0", "--json")
    report = json.loads(out.splitlines()[-1])
    assert code == 1
    assert (report["ended"], report["exit_code"], report["stdout"]) == ("exited", 1, "out")
    assert report["stderr"].endswith("ZeroDivisionError: division by zero\n")


def test_errors_explain_a_wrong_file_command_or_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "run", "missing.py"]) == 2
    assert "cannot read the program 'missing.py'" in capsys.readouterr().err
    assert main(["sandbox", "rnu"]) == 2
    assert "did you mean 'run'" in capsys.readouterr().err
    assert main(["sandbox", "run", "missing.py", "--backend", "dokcer"]) == 2
    assert "invalid choice 'dokcer'" in capsys.readouterr().err


def test_without_a_daemon_the_docker_error_explains_what_to_do(
    run: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    code, _, err = run("1", "--backend", "docker")
    assert code == 1 and "no Docker daemon answers at unix:///nowhere/docker.sock: start one" in err[-1]
    assert run("1", "--image", "python:3.12")[2][-1].endswith("give backend='docker'")
    assert main(["sandbox", "reap"]) == 1
    assert "DOCKER_HOST" in capfd.readouterr().err
