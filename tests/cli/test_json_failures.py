"""A failure under `--json` is one strict JSON object with `error` on standard output, for every command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.completion import all_help
from agentgym.cli.main import main

Command = Callable[..., Any]
FAILURES = {
    "": "unknown option '--json'",
    "evl": "unknown command 'evl'",
    "env lst": "unknown command 'agentgym env lst'",
    "play TextGame-v0": "unknown option '--json'",
    "eval": "missing --env",
    "eval --env TextGame-v0 -n": "Missing value for argument",
    "eval --env TextGame-v0 -n many": "a number was wanted, got 'many'",
    "eval --env TextGme-v0 --policy oracle": "did you mean 'TextGame-v0'?",
    "eval --env flaky.py:Broken --policy random -n 4": "flaky.py:Broken",
    "train --env TextGame-v0 --algo flaky.py:Flaky": "advantage estimator 'flaky.py:Flaky' takes",
    "sft --episodes nowhere": "there is no run folder 'nowhere'",
    "generate --input no.jsonl --output out.jsonl": "no.jsonl",
    "verify nowhere": "nowhere is not a folder",
    "view nowhere": "nowhere does not exist",
    "compare nowhere elsewhere": "nowhere",
    "episodes nowhere": "'nowhere' holds no episodes",
    "rescore nowhere": "rescore needs a reward",
    "export nowhere out": "nowhere",
    "new foo": "unknown command 'agentgym new foo'",
    "tools call nothing": "unknown tool 'nothing'",
    "sandbox run nothing.py": "nothing.py",
    "models check ./nothing": "./nothing",
    "import verl nothing.yaml": "no file 'nothing.yaml'",
}
"""What is wrong with a command, by its line without `--json`."""


def read_strictly(text: str) -> dict[str, Any]:
    """Returns the one JSON object that a text is, by RFC 8259: no NaN, no name twice, no second value."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    assert text.endswith("\n") and text.count("\n") == 1
    value = json.loads(text, parse_constant=refuse, object_pairs_hook=collect)
    assert isinstance(value, dict)
    return value


def check(done: Any) -> str:
    """Checks a failure, and returns its error."""
    error = read_strictly(done.out)["error"]
    assert done.code in (1, 2) and f"error: {error}" in done.err
    assert isinstance(error, str)
    return error


@pytest.mark.parametrize("line", FAILURES)
def test_a_failure_is_one_object_with_its_error(line: str, agentgym: Command) -> None:
    assert FAILURES[line] in check(agentgym(*line.split(), "--json"))


def test_a_misspelled_option_of_every_command_is_one_object(agentgym: Command) -> None:
    with_json = [page for page in all_help() if "json" in [option.setting for option in page.options]]
    assert len(with_json) > 25
    for page in with_json:
        error = check(agentgym(*page.prog.split()[1:], "--jsn", "1", "--json"))
        assert error.startswith("unknown option '--jsn': did you mean '--json'?"), page.prog


def test_help_is_no_failure(agentgym: Command) -> None:
    done = agentgym("eval", "--json", "--help")
    assert done.code == 0 and done.out == "" and "usage: agentgym eval" in done.err


def test_an_error_of_ours_is_an_object_and_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(args: list[str]) -> int:
        raise ZeroDivisionError("our own\nfault")

    monkeypatch.setattr("agentgym.cli.verify.main", break_down)
    with pytest.raises(ZeroDivisionError):
        main(["verify", "run", "--json"])
    assert read_strictly(capsys.readouterr().out) == {"error": "ZeroDivisionError: our own"}


def test_a_result_with_failures_has_the_first_as_error(agentgym: Command, tmp_path: Path) -> None:
    done = agentgym("plan", "--model", "embedded", "--gpu.memory-gib", "0.001", "--json")
    value = read_strictly(done.out)
    assert done.code == 1 and value["fits"] is False and value["error"] == value["problems"][0]
    (tmp_path / "stuck.py").write_text('def stuck() -> str:\n    """Fails."""\n    raise ValueError(\'No.\')\n')
    assert read_strictly(agentgym("tools", "call", "stuck.py:stuck", "--json").out)["error"]


@pytest.mark.long
def test_an_interrupt_and_a_closed_pipe(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "agentgym"]
    words = ["eval", "TextGame-v0", "--policy", "random", "-n", "5000", "--output", str(tmp_path / "run"), "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*program, *words], **pipes) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "episodes" in line)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and read_strictly(out)["error"].startswith("interrupted; finished episodes")
    line = f"{' '.join(program)} evl --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=dict(os.environ), check=False)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
