"""A person plays in the terminal, or through a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main

Command = Callable[..., Any]


def test_the_hints_win_every_bundled_game(agentgym: Command) -> None:
    for env in ("TextGame-v0", "GuessNumber-v0", "WordLadder-v0", "Prompt-v0", "LongRoad-v0"):
        typed = ""
        for _ in range(40):
            done = agentgym("play", env, "--seed", "4", typed=f"{typed}hint\n")
            if "left before" not in done.out:
                break
            hint = done.out.partition("\nleft before")[0].rstrip().splitlines()[-1]
            typed += f"{hint}\n"
        assert "success: reward 1 after" in done.out, done.out
        assert f"agentgym eval --env {env}\n" in done.out and f"agentgym train --env {env}" in done.out


def test_a_command_and_json_are_the_same_move(agentgym: Command) -> None:
    plain = agentgym("play", "TextGame-v0", typed="go north\n")
    spelled = agentgym("play", "TextGame-v0", typed='{"name": "go", "arguments": {"direction": "north"}}\n')
    answers = [done.out.partition("\n> ")[2].partition("\n")[2] for done in (plain, spelled)]
    assert answers[0] == answers[1] and "Room:" in answers[0]


def test_the_seed_is_the_task(agentgym: Command) -> None:
    first, again, second_task = (agentgym("play", "TextGame-v0", "--seed", seed).out for seed in (1, 1, 2))
    assert first == again != second_task


@pytest.mark.parametrize("typed", ["", "quit\n", "exit\n", "\n\n", "help\ntools\nhint\n"])
def test_leaving_early_is_no_failure(typed: str, agentgym: Command) -> None:
    done = agentgym("play", "TextGame-v0", typed=typed)
    assert done.code == 0 and done.err == ""
    assert "left before the end: reward 0 after 0 turns (seed 0)" in done.out


def test_tools_and_help_are_shown(agentgym: Command) -> None:
    done = agentgym("play", "TextGame-v0", "--env-kwargs", "level=1", typed="tools\nhelp\n")
    assert "north|east|south|west" in done.out and '{"name": "go"' in done.out
    assert "--env-kwargs level=1" in done.out


def test_a_word_of_ours_reaches_the_environment_behind_a_backslash(agentgym: Command) -> None:
    assert "That is not a command." in agentgym("play", "TextGame-v0", typed="\\help\n").out


def test_an_environment_without_tools_or_oracle_is_played_by_text(agentgym: Command) -> None:
    done = agentgym("play", "flaky.py:Flaky", "--seed", "1", typed="tools\nhint\nhello\n")
    assert done.code == 0
    assert "There are no tools" in done.out and "There is no hint" in done.out
    assert "reward 1 after 1 turns (seed 1)" in done.out


RUDE = """
from agentgym.envs import TextEnv

TURNS = "\\u200e\\u200f\\u202a\\u202b\\u202c\\u202d\\u202e\\u2066\\u2067\\u2068\\u2069"

class Rude(TextEnv):
    def reset(self, *, seed=None, options=None):
        return "\\x1b]0;PWNED\\x07\\x1b[2J\\u009b31m a\\tb" + TURNS, {}

    def step(self, action):
        return "\\x08\\r gone", 0.0, True, False, {}
"""


def test_control_characters_of_an_environment_are_spelled_out(agentgym: Command, tmp_path: Path) -> None:
    (tmp_path / "rude.py").write_text(RUDE)
    done = agentgym("play", f"{tmp_path}/rude.py:Rude", typed="hm\n")
    assert done.code == 0 and r"\x1b]0;PWNED\x07\x1b[2J\x9b31m a" in done.out and r"\x08\x0d gone" in done.out
    assert r"a	b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069" in done.out
    assert all(character.isprintable() or character in "\n\t" for character in done.out)


TEA = """
from agentgym import ToolEnv, tool


class Tea(ToolEnv):
    system_prompt = "Tee ☕"
    tools_optional = True

    def start(self, options):
        return "☕ \\ud800"

    def on_message(self, text):
        self.end(success=text == "grün", reward=1.0)
        return f"You said {text}."

    @tool
    def brew(self) -> str:
        \"\"\"Brews ☕.\"\"\"
        return ""
"""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_bytes_that_are_no_text_are_read_spelled_out(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tea.py").write_text(TEA, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff tea\n"), encoding))
    assert main(["play", "tea.py:Tea"]) == 0
    assert "tea." in capsys.readouterr().out


@pytest.mark.parametrize("command", ["play tea.py:Tea", "tools list tea.py:Tea", "play tee☕.py:Tea"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_text_is_shown_in_any_encoding(
    command: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tea.py").write_text(TEA, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    typed = io.TextIOWrapper(io.BytesIO("grün\n".encode("utf-8" if encoding == "ascii" else encoding)), encoding)
    for name, stream in {"stdout": out, "stderr": err, "stdin": typed}.items():
        monkeypatch.setattr(sys, name, stream)
    code = main(command.split())
    output = "".join(stream.buffer.getvalue().decode(encoding) for stream in (out, err))
    assert code == (2 if "tee" in command else 0)
    assert ("☕" if encoding == "utf-8" else "\\u2615") in output
    if "play tea" in command:
        assert "\\ud800" in output and "success: reward 1 after 1 turns" in output
