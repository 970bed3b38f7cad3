"""Episodes survive the file byte by byte, a kill, and a full disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentgym.errors import RunFolderError
from agentgym.rollout.record.episodes_file import (
    EpisodeWriter,
    read_episodes,
    trajectory_from_json,
    trajectory_to_json,
)
from agentgym.rollout.record.line_reader import FILE_NAME, PACKED_NAME
from agentgym.rollout.record.tools_file import menu_digest, menu_lines, read_menus
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import MalformedCall, Message, Task, ToolCall, ToolResult, ToolSpec

numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(), max_size=12)  # lone surrogates included
token_ids = st.integers(0, 300_000)
fp32_logprobs = st.floats(-1e4, 0.0, width=32)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
calls = st.builds(ToolCall, texts, texts, st.dictionaries(texts, json_values, max_size=3)) | st.builds(
    MalformedCall, texts, texts, texts, st.booleans()
)
told_messages = st.builds(Message, st.sampled_from(["system", "user"]), texts) | st.builds(
    lambda content, call_id, name: Message("tool", content, tool_call_id=call_id, name=name),
    texts,
    texts,
    st.none() | texts,
)
menus = st.lists(st.builds(ToolSpec, texts, texts, st.dictionaries(texts, json_values, max_size=2)), max_size=2)
turns = st.builds(
    Turn,
    st.builds(Message, st.just("assistant"), texts, st.none() | texts, st.lists(calls, max_size=2).map(tuple)),
    numbers.filter(lambda value: abs(value) < 1e300),
    texts,
    st.lists(st.builds(ToolResult, texts, texts, texts, st.none() | texts), max_size=2).map(tuple),
    st.sampled_from(["stop", "length", "abort"]),
    st.sampled_from(["", "Sum up."]),
    st.none() | st.lists(told_messages, max_size=2).map(tuple),
)


@st.composite
def replies(draw: st.DrawFn) -> TokenSpan:
    sampled = draw(st.lists(st.tuples(token_ids, fp32_logprobs), min_size=1, max_size=5))
    versions = sorted(draw(st.lists(st.integers(0, 9), min_size=len(sampled), max_size=len(sampled))))
    ids, logprobs = zip(*sampled, strict=True)
    return TokenSpan(ids, Source.POLICY, logprobs, tuple(versions), excluded=draw(st.sampled_from(["", "summary"])))


tool_sets = st.none() | menus.map(tuple)
"""The tools of a row."""


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    turns_drawn = draw(st.lists(st.tuples(replies(), turns), min_size=1, max_size=3))
    spans = [TokenSpan(tuple(draw(st.lists(token_ids, min_size=1, max_size=4))), Source.PROMPT)]
    for reply, _ in turns_drawn:
        spans += [reply, TokenSpan(tuple(draw(st.lists(token_ids, max_size=3))), Source.ENV)]
    options = draw(st.dictionaries(texts, json_values, max_size=2))
    return Trajectory(
        task=Task(draw(texts), draw(st.integers(0, 2**63)), options),
        group=draw(texts),
        member=draw(st.integers(0, 99)),
        rows=(Row(tuple(spans), draw(st.none() | st.lists(told_messages, max_size=3).map(tuple)), draw(tool_sets)),),
        turns=tuple(turn for _, turn in turns_drawn),
        status=Status.TRUNCATED,
        stop_reason=draw(st.sampled_from([StopReason.MAX_TURNS, StopReason.CONTEXT])),
        metrics=draw(st.dictionaries(texts, numbers, max_size=3)),
        info=draw(st.dictionaries(texts, json_values, max_size=3)),
    )


def failed(member: int = 0) -> Trajectory:
    return Trajectory(
        Task("X-v0", 1), "0", member, (), (), Status.ENV_ERROR, StopReason.ENV_ERROR, error="ValueError: no"
    )


@pytest.mark.long
@given(trajectories())
def test_a_trajectory_reads_back_equal(trajectory: Trajectory) -> None:
    line = json.dumps(trajectory_to_json(trajectory), allow_nan=False, default=dict)
    sets = {menu_digest(row.tools): row.tools for row in trajectory.rows if row.tools is not None}
    again = trajectory_from_json(json.loads(line), sets)
    assert again == trajectory
    assert all(row.tools is None for row in trajectory_from_json(json.loads(line)).rows)
    assert json.dumps(trajectory_to_json(again), default=dict) == line


@given(fp32_logprobs)
def test_an_fp32_logprob_keeps_its_bits(logprob: float) -> None:
    assert struct.pack("<f", json.loads(json.dumps(logprob))) == struct.pack("<f", logprob)


@given(st.lists(trajectories(), max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=20)
def test_a_file_reads_back_in_order_with_phase_step_and_advantages(tmp_path: Path, written: list[Trajectory]) -> None:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / FILE_NAME).unlink(missing_ok=True)
    advantages = [[[0.5] * row.num_trained_tokens for row in trajectory.rows] for trajectory in written]
    with EpisodeWriter(folder) as writer:
        writer.write(written, phase="train", step=3, advantages=advantages)
        writer.write([failed()], phase="eval", step=4)
    records = list(read_episodes(folder))
    assert [record.trajectory for record in records] == [*written, failed()]
    assert [(record.phase, record.step) for record in records] == [("train", 3)] * len(written) + [("eval", 4)]
    assert [record.advantages for record in records[:-1]] == [tuple(map(tuple, rows)) for rows in advantages]
    assert records[-1].advantages is None


def test_a_line_has_the_documented_keys() -> None:
    line = trajectory_to_json(failed(), phase="eval_after", step=2)
    assert list(line) == [
        "phase", "step", "group", "member", "task", "status", "stop_reason", "reward", "success", "metrics", "error",
        "info", "rows", "turns", "advantages", "credit",
    ]  # fmt: skip
    assert line["reward"] is None
    assert line["success"] is None


def test_a_line_torn_by_a_kill_is_dropped_with_a_warning_and_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EpisodeWriter(tmp_path) as writer:
        writer.write([failed(0), failed(1)])
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-20])
    assert [record.trajectory.member for record in read_episodes(tmp_path)] == [0]
    assert "line 2 is torn" in caplog.text
    with EpisodeWriter(tmp_path) as writer:
        writer.write([failed(2)])
    assert [record.trajectory.member for record in read_episodes(path)] == [0, 2]


@pytest.mark.parametrize("compress", [False, True])
def test_rewinding_drops_the_steps_that_a_resumed_run_plays_again(tmp_path: Path, compress: bool) -> None:
    with EpisodeWriter(tmp_path, compress=compress) as writer:
        for step in range(4):
            writer.write([failed(step)], step=step)
        writer.rewind(1)
        writer.write([failed(9)], step=2)
    assert [(record.step, record.trajectory.member) for record in read_episodes(tmp_path)] == [(0, 0), (1, 1), (2, 9)]


@pytest.mark.parametrize("compress", [False, True])
def test_rewinding_drops_the_evaluation_that_a_resumed_run_plays_again(tmp_path: Path, compress: bool) -> None:
    with EpisodeWriter(tmp_path, compress=compress) as writer:
        for step, phase in ((0, "eval_before"), (1, "train"), (1, "eval_after")):
            writer.write([failed(step)], step=step, phase=phase)
        writer.rewind(1)
        assert [record.phase for record in read_episodes(tmp_path)] == ["eval_before", "train"]
        writer.rewind(-1)
    assert not list(read_episodes(tmp_path))


@pytest.mark.parametrize(("compress", "name"), [(False, FILE_NAME), (True, PACKED_NAME)])
def test_a_full_disk_names_the_folder_and_loses_nothing(tmp_path: Path, compress: bool, name: str) -> None:
    resource = pytest.importorskip("resource", reason="file size limits are POSIX")
    signal = pytest.importorskip("signal")
    with EpisodeWriter(tmp_path, compress=compress) as writer:
        writer.write([failed(0)])
        whole = (tmp_path / name).stat().st_size
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 50, limits[1]))
        try:
            with pytest.raises(RunFolderError, match=str(tmp_path)):
                writer.write([failed(1)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
        assert (tmp_path / name).stat().st_size == whole
        writer.write([failed(2)])
    assert [record.trajectory.member for record in read_episodes(tmp_path)] == [0, 2]


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="does not exist"):
        list(read_episodes(tmp_path))
    with pytest.raises(RunFolderError, match="cannot write"):
        EpisodeWriter(tmp_path / "absent")
    (tmp_path / FILE_NAME).write_text('{"phase": "train"}\n')
    with pytest.raises(RunFolderError, match="line 1 is not an episode"):
        list(read_episodes(tmp_path))


def with_tools(*names: str) -> Trajectory:
    """An episode with a row for each name, under a tool of that name."""
    rows = [
        Row((TokenSpan((1,), Source.PROMPT), TokenSpan((2,), Source.POLICY, (-0.5,), (0,))), (), (spec(name),))
        for name in names
    ]
    turns = [Turn(Message("assistant", ""), 0.0) for _ in names]
    ending = (Status.COMPLETED, StopReason.TERMINATED)
    return Trajectory(Task("X-v0", 1), "0", 0, tuple(rows), tuple(turns), *ending)


def spec(name: str) -> ToolSpec:
    return ToolSpec(name, "Does it.", {"type": "object", "properties": {"b": {}, "a": {}}})


def test_each_set_of_tools_is_written_once_whoever_wrote_it_first(tmp_path: Path) -> None:
    for _ in range(2):
        with EpisodeWriter(tmp_path) as writer:
            writer.write([with_tools("go", "look"), with_tools("go")])
            writer.write([with_tools("look")])
    assert len((tmp_path / "tools.jsonl").read_bytes().splitlines()) == 2
    assert [record.trajectory for record in read_episodes(tmp_path)][:2] == [with_tools("go", "look"), with_tools("go")]
    (tools,) = [tools for tools in read_menus(tmp_path).values() if tools[0].name == "go"]
    assert list(tools[0].parameters["properties"]) == ["b", "a"], "in the order in which the model was shown them"


def test_what_a_kill_left_of_a_set_of_tools_is_written_again(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path) as writer:
        writer.write([with_tools("go")])
    file = tmp_path / "tools.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert read_menus(tmp_path) == {}
    with EpisodeWriter(tmp_path) as writer:
        writer.write([with_tools("go")])
    assert file.read_bytes() == menu_lines({menu_digest((spec("go"),)): (spec("go"),)})
    file.write_bytes(b'{"digest": "x"}\n')
    with pytest.raises(RunFolderError, match="line 1 is not a set of tools"):
        read_menus(tmp_path)
