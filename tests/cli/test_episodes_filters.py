"""`agentgym episodes` with filters: the lines that fit, in order, or readable conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import MalformedCall, Message, Task, ToolCall, ToolResult

Command = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    opening = (Message("system", "Win."), Message("user", "A hall.\nA chest."))
    row = Row((TokenSpan((1,), Source.PROMPT), TokenSpan((2,), Source.POLICY, (-0.5,), (0,))), opening)
    call = Message("assistant", "I take it.", "It shines.", (ToolCall("c0", "take", {"item": "pearl"}),))
    broken = Message("assistant", "", None, (MalformedCall("c0", "{", "not JSON"),))
    with EpisodeWriter(tmp_path) as writer:
        for seed, (message, text) in enumerate(
            [(call, "It is \x1b[31m cursed\u202e."), (broken, "Unreadable."), (call, "Won.")]
        ):
            results = (ToolResult("c0", "take", text, "malformed" if message is broken else None),)
            turn = Turn(message, float(seed == 2), text, results)
            end = Status.COMPLETED, StopReason.TERMINATED
            writer.write(
                [Trajectory(Task("Ask-v0", seed), str(seed), 0, (row,), (turn,), *end, {"success": seed == 2})],
                phase="eval",
            )
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--failed",), [0, 1]),
        (("--contains", "curs"), [0]),
        (("--contains", "pearl", "--min-reward", "1"), [2]),
        (("--error", "malformed"), [1]),
        (("--tool", "take", "--sort", "seed", "--descending"), [2, 0]),
        (("--sort", "reward", "--descending", "-n", "1"), [2]),
        (("--phase", "eval", "--step", "0", "--task", "Ask-v0/1"), [1]),
    ],
)
def test_lines_are_those_that_fit_in_their_order(
    run: Path, capfdbinary: pytest.CaptureFixture[bytes], options: tuple[str, ...], expected: list[int]
) -> None:
    assert main(["episodes", str(run), *options]) == 0
    lines = capfdbinary.readouterr().out.splitlines()
    assert [json.loads(line)["task"]["seed"] for line in lines] == expected
    assert set(lines) <= set((run / "episodes.jsonl").read_bytes().splitlines())


def test_conversations_are_read_and_control_no_terminal(agentgym: Command, run: Path) -> None:
    done = agentgym("episodes", str(run), "--failed", "--text")
    assert done.code == 0 and "\x1b" not in done.out and "\u202e" not in done.out
    first, second = done.out.split("\n\n")[:2]
    assert first.splitlines() == [
        "=== episode 1 | eval step 0 | Ask-v0/0 | failed, reward 0 | completed, terminated | 1 turns",
        "system: Win.", "user: A hall.", "    A chest.",
        "assistant: I take it.", "reasoning: It shines.", 'assistant calls take(item="pearl")',
        "tool take: It is \\x1b[31m cursed\\u202e.",
    ]  # fmt: skip
    assert "assistant calls (malformed): {" in second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--phase", "evl"), "no episode has the phase 'evl': did you mean 'eval'"),
        (("--tool", "drop"), "There is take"),
        (("--sort", "rewrd"), "did you mean 'reward'"),
        (("-n", "0"), "at least 1"),
        (("out.jsonl", "--text"), "name no file"),
    ],
)
def test_a_filter_that_no_episode_can_fit_is_named(
    agentgym: Command, run: Path, options: tuple[str, ...], message: str
) -> None:
    done = agentgym("episodes", str(run), *options)
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1


def test_a_file_holds_the_episodes_that_fit(agentgym: Command, run: Path) -> None:
    assert agentgym("episodes", str(run), str(run / "some.jsonl"), "--failed").code == 0
    assert len((run / "some.jsonl").read_text().splitlines()) == 2
    assert "no episode fits" in agentgym("episodes", str(run), "--contains", "nothing").err
