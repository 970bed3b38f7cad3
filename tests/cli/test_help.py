"""The help of every command: as wide as the terminal, short, and of exactly the options that are read."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import tyro

from agentgym.cli import options
from agentgym.cli.completion import all_help
from agentgym.cli.help_text import Help, Option, option_table
from agentgym.cli.main import command

Command = Callable[..., Any]
SHORT = ("train", "sft", "dpo", "eval", "generate", "serve", "rescore", "reward-server", "plan")


@cache
def helps() -> list[Help]:
    return list(all_help())


def test_help_is_no_wider_than_columns_and_short() -> None:
    assert len(helps()) > 45
    for page in helps():
        assert len(page.to_text(80).splitlines()) <= 100, page.prog
        for width in (40, 80, 200):
            for is_full in (False, True):
                lines = replace(page, is_full=is_full).to_text(width).splitlines()
                assert lines[0].startswith(f"usage: {page.prog}") and max(map(len, lines)) <= width, page.prog


def test_commands_with_many_options_have_a_short_help_that_names_the_full_one() -> None:
    short = {page.prog.removeprefix("agentgym ") for page in helps() if page.main_settings}
    assert short == {*SHORT}
    for page in helps():
        if page.main_settings:
            text = page.to_text(80)
            assert f"All settings: {page.prog} --help-all" in text
            assert "json" not in [option.setting for option in page.options] or "\n  --json\n" in text


def test_every_option_has_help_and_every_name_once() -> None:
    for page in helps():
        names = [name for option in page.options for name in option.names]
        assert len(names) == len({*names}), page.prog
        assert all(option.text for option in page.options), page.prog


def test_help_has_the_options_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type[object]] = []

    def note(kind: type[object]) -> list[Option]:
        kinds.append(kind)
        return []

    monkeypatch.setattr(options, "option_table", note)
    for page in helps():
        if page.options:
            name, *rest = page.prog.split()[1:]
            with pytest.raises(Help):
                command(name)([*rest, "--help"])
    for kind in {*kinds}:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # tyro's parsers have no other public door
            parser = tyro.extras.get_parser(kind, registry=options._registry())
        names = sorted(tuple(action.option_strings) for action in parser._actions if action.dest != "help")
        assert sorted(option.names for option in option_table(kind)) == names, kind


def test_help_in_a_pipe_and_in_a_terminal_is_as_wide_as_it(agentgym: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    wide = agentgym("env", "list", "--help").out
    assert 80 < max(map(len, wide.splitlines())) <= 100
    assert agentgym("env", "list", "--help-all").out == wide
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    ends = pty.openpty()
    try:
        subprocess.run(["stty", "cols", "50", "rows", "20"], stdin=ends[1], check=True)
        words = [sys.executable, "-m", "agentgym", "env", "list", "--help"]
        done = subprocess.run(words, stdin=ends[1], stdout=subprocess.PIPE, env=environment, text=True, check=True)
    finally:
        for end in ends:
            os.close(end)
    assert 40 < max(map(len, done.stdout.splitlines())) <= 50


def test_a_table_is_as_wide_as_columns(agentgym: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        for words in (["tools", "list"], ["env", "list"], ["env", "list", "--adapters"], ["models", "list"]):
            rows = [line for line in agentgym(*words).out.splitlines() if ":" not in line]
            assert max(map(len, rows)) <= width, words


def test_an_environment_takes_at_most_two_lines_at_80_columns(
    agentgym: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = agentgym("env", "list").out.splitlines()
    assert max(map(len, lines)) <= 80
    starts = [index for index, line in enumerate(lines) if "-v0 " in line] + [lines.index(lines[-3])]
    assert len(starts) == 20
    assert all(after - before <= 2 for before, after in pairwise(starts))
    assert "level=1|2|3|4|5  are seen one at a time. Tools: go, take, open, use, look." in lines
