"""The commands that read episodes, on a file with a line that holds any JSON in place of a field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import MalformedCall, Message, Task, ToolCall, ToolResult

Command = Callable[..., Any]
COMMANDS = [
    ("view", "run", "--share", "run.html"),
    ("episodes", "run", "out.parquet"),
    ("rescore", "run", "--reward.function", "exact_match", "--output", "rescored"),
    ("compare", "run", "other"),
    ("sft", "--episodes", "run", "--steps", "1", "--output", "taught"),
    ("dpo", "--episodes", "run", "--steps", "1", "--output", "taught"),
    ("verify", "run"),
]
INFINITE, NOT_A_NUMBER, GREAT = float("inf"), float("nan"), 10**400
TURN, SPAN = ("turns", 0), ("rows", 0, "spans", 1)
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
HOSTILE: list[tuple[tuple[Any, ...], Any]] = [
    *(((name,), value) for name in ("phase", "group", "status", "rows", "turns") for value in (None, 1, {}, [1])),
    *(((name,), value) for name in ("step", "member") for value in (True, "1", 1.5, GREAT, None)),
    *(((name,), value) for name in ("metrics", "info", "task") for value in (0, "x", ["x"], None, {"a": INFINITE})),
    *((("metrics", "tool_errors"), value) for value in (NOT_A_NUMBER, INFINITE, None, "1", [[]], GREAT)),
    *((("task", name), value) for name in ("options", "kwargs") for value in (True, "", [[]], {"a": NOT_A_NUMBER})),
    *((("task", "env_id"), value) for value in (1, {}, [[]])),
    (("task", "seed"), []),
    (("task", "options"), {"a": DEEP}),
    *(((*TURN, "reward"), value) for value in (INFINITE, NOT_A_NUMBER, "1", GREAT)),
    *(((*TURN, "message", name), 5) for name in ("content", "reasoning", "tool_calls", "role")),
    *(((*TURN, "message", "tool_calls", 0, name), [INFINITE]) for name in ("id", "name", "arguments")),
    *(((*TURN, "message", "tool_calls", 1, name), 1.0) for name in ("id", "raw", "error")),
    *(((*TURN, "tool_results", 0, name), {}) for name in ("call_id", "name", "content", "error")),
    *(((*SPAN, "ids"), value) for value in ([-1], [None], [1.5], "12", [GREAT], [2**40])),
    *(((*SPAN, "logprobs"), value) for value in ([NOT_A_NUMBER], ["0"], [-GREAT], None)),
    *(((*SPAN, "policy_versions"), value) for value in ([GREAT], [1.5], [[]])),
    *((("advantages",), value) for value in ("x", [["x"]], [[GREAT]], 3)),
    *((("rows", 0), value) for value in ([None], "x", 5)),
]


@pytest.fixture
def run(agentgym: Command) -> Path:
    calls = (ToolCall("0", "go", {"to": "north"}), MalformedCall("1", "{", "no JSON"))
    results = (ToolResult("0", "go", "There."), ToolResult("1", "", "No call.", "malformed"))
    spans = (TokenSpan((1,), Source.PROMPT), TokenSpan((2,), Source.POLICY, (-0.5,), (0,)))
    turns = (Turn(Message("assistant", "", None, calls), 1.0, "", results),)
    episode = Trajectory(Task("Ask-v0", 1), "0", 0, (Row(spans),), turns, Status.COMPLETED, StopReason.TERMINATED)
    for name in ("run", "other"):
        Path(name).mkdir()
        with EpisodeWriter(name) as writer:
            writer.write([episode, episode], phase="eval", advantages=[[[0.5]], [[0.5]]])
    return Path("run")


def put(line: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(line)
    part = changed
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return changed


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_a_line_that_is_no_episode_is_named_by_its_number(agentgym: Command, run: Path, case: int) -> None:
    readers = COMMANDS[:-1]
    check_hostile_line(agentgym, run, case, [readers[case % len(readers)]])  # in turn, as each takes its time to start


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_every_command_names_a_line_that_is_no_episode(agentgym: Command, run: Path, case: int) -> None:
    check_hostile_line(agentgym, run, case, COMMANDS[:-1])


def check_hostile_line(agentgym: Command, run: Path, case: int, commands: Sequence[tuple[str, ...]]) -> None:
    (path, value), (first, second) = HOSTILE[case], (run / "episodes.jsonl").read_text().splitlines()
    (run / "episodes.jsonl").write_text(f"{first}\n{json.dumps(put(json.loads(second), path, value))}\n")
    for words in commands:
        done = agentgym(*words)
        is_shown = words[0] == "view" and done.code == 0  # the report shows less than the others read
        assert is_shown or (done.code == 2 and "line 2" in done.err and done.err.count("\n") == 1), (words, done)
    assert agentgym("verify", "run").code == 1


@pytest.mark.parametrize("line", ["[" * 100_000, "5", '{"a": 1e400}', f'{{"step": {"9" * 5000}}}', '"\\ud800"', "{}"])
def test_a_line_that_is_no_object_is_named_by_its_number(agentgym: Command, run: Path, line: str) -> None:
    first = (run / "episodes.jsonl").read_text().splitlines()[0]
    (run / "episodes.jsonl").write_text(f"{first}\n{line}\n")
    for words in COMMANDS[:-1]:
        done = agentgym(*words)
        assert done.code == 2 and "line 2" in done.err and done.err.count("\n") == 1, (words, done)
    assert agentgym("verify", "run").code == 1


def test_lone_surrogates_and_long_seeds_are_told_apart(agentgym: Command, run: Path) -> None:
    first, second = (run / "episodes.jsonl").read_text().splitlines()
    for path in [("group",), ("task", "env_id"), (*TURN, "message", "content"), (*TURN, "tool_results", 0, "content")]:
        (run / "episodes.jsonl").write_text(f"{first}\n{json.dumps(put(json.loads(second), path, chr(0xD800)))}\n")
        assert agentgym("episodes", "run", "out.parquet").code == 0
    (run / "episodes.jsonl").write_text(f"{first}\n{json.dumps(put(json.loads(second), ('task', 'seed'), 2**70))}\n")
    assert "line 2 fits in no table" in agentgym("episodes", "run", "out.parquet").err
    assert agentgym("compare", "run", "other").code == 0
