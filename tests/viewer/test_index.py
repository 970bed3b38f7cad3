"""The index of a run's episodes: equal to its file, whatever happens to either of them."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import ConfigError
from agentgym.rollout.record.frames import pack_lines
from agentgym.viewer import EpisodeFilter, RunIndex, count_values, failure_groups, find_rows
from agentgym.viewer.index.causes import merge_texts
from agentgym.viewer.index.filters import filter_from_json

MakeRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agentgym" / "runs"


def recorded(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]


def numbers(index: RunIndex, sort: str = "line", descending: bool = False, **values: Any) -> list[int]:
    count, rows = find_rows(index, filter_from_json(values), sort, descending, offset=0, limit=1000)
    assert count == len(rows)
    return [row["line"] for row in rows]  # type: ignore[misc]


def updated(run: Path) -> RunIndex:
    index = RunIndex(run)
    assert index.update()
    return index


@pytest.fixture(params=["plain", "packed"])
def run(make_run: MakeRun, request: pytest.FixtureRequest) -> Path:
    """A run of which `episodes.jsonl` stays as a plain copy, in `plain/`."""
    run = make_run()
    (run / "plain").mkdir()
    shutil.copy(run / "episodes.jsonl", run / "plain")
    if request.param == "packed":
        lines = (run / "episodes.jsonl").read_bytes().splitlines(keepends=True)
        (run / "episodes.jsonl.zst").write_bytes(
            b"".join(b"".join(pack_lines(lines[i : i + 7])) for i in range(0, 56, 7))
        )
        (run / "episodes.jsonl").unlink()
    return run


def test_filters_and_orders_are_those_of_the_lines(run: Path) -> None:
    index, episodes = updated(run), dict(enumerate(recorded(run / "plain"), 1))

    def lines(fits: Callable[[dict[str, Any]], object]) -> list[int]:
        return [line for line, episode in episodes.items() if fits(episode)]

    assert numbers(index) == list(episodes) and len(episodes) == 56
    assert numbers(index, phase="train", first_step=3, last_step=4) == lines(
        lambda e: e["phase"] == "train" and e["step"] in (3, 4)
    )
    failed = lines(lambda e: not e["success"])
    assert numbers(index, failed=True) == failed and 0 < len(failed) < 56
    assert numbers(index, failed=False) == lines(lambda e: e["success"])
    assert numbers(index, stop="env_error", status="env_error") == lines(lambda e: e["status"] == "env_error") != []
    assert numbers(index, min_turns=3, max_turns=4) == lines(lambda e: 3 <= len(e["turns"]) <= 4)
    assert numbers(index, min_reward=0.5) == lines(lambda e: (e["reward"] or 0) >= 0.5)
    assert numbers(index, seed=5, task="TextGame") == lines(lambda e: e["task"]["seed"] == 5) != []
    assert numbers(index, metric="steps_over_optimal", min_metric=2) == lines(lambda e: e["metrics"])
    wrong = lines(lambda e: any("raw" in call for turn in e["turns"] for call in turn["message"]["tool_calls"]))
    assert numbers(index, error="malformed") == numbers(index, error="any") == wrong != []
    by_length = sorted(episodes, key=lambda line: -len(episodes[line]["turns"]))
    assert numbers(index, "turns", descending=True) == by_length
    assert numbers(index, tool="go", contains='"walk south"') == lines(
        lambda e: (
            any("walk south" in turn["observation"] for turn in e["turns"])
            and any("name" in call for turn in e["turns"] for call in turn["message"]["tool_calls"])
        )
    )
    assert count_values(index)["phase"] == [("eval_after", 4), ("eval_before", 4), ("train", 48)]


@pytest.mark.parametrize("text", ["sout", "south dark", '"walk sou', "SOUTH"])
def test_a_search_finds_beginnings_of_its_last_word_all_words_and_any_case(run: Path, text: str) -> None:
    index = updated(run)
    assert numbers(index, contains=text) == numbers(index, contains="south") != []
    assert numbers(index, contains="so uth") == numbers(index, contains="...") == numbers(index, contains="sou ") == []


@pytest.mark.parametrize("text", ['"', '""', 'a" OR line', "*", "NEAR(", "\0", "'; DROP TABLE episodes", "-x", "col:y"])
def test_any_text_is_searched_as_words(run: Path, text: str) -> None:
    assert isinstance(numbers(updated(run), contains=text), list)


def test_a_run_that_grows_is_read_on_and_one_that_is_cut_back_is_read_again(run: Path) -> None:
    path = next(run.glob("episodes.*"))
    whole = path.read_bytes()
    index = RunIndex(run)
    for size in (0, len(whole) // 3, len(whole) // 2, len(whole)):
        path.write_bytes(whole[:size])
        assert index.update()
        num_lines = index.state().lines
        assert numbers(index) == list(range(1, num_lines + 1))
    assert num_lines == 56
    path.write_bytes(whole[: len(whole) // 2])
    index.update()
    assert 0 < len(numbers(index)) < 56
    if path.suffix == ".jsonl":
        path.write_bytes(whole.replace(b'"phase": "train"', b'"phase": "greedy"'))
        index.update()
        assert numbers(index, phase="greedy") != [] and len(numbers(index)) == 56


def test_two_processes_may_index_a_run_at_once(run: Path) -> None:
    both = [RunIndex(run), RunIndex(run)]
    threads = [threading.Thread(target=index.update) for index in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [numbers(index) for index in both] == [list(range(1, 57))] * 2


def test_an_index_that_is_damaged_or_old_is_built_again(run: Path, cache: Path) -> None:
    updated(run).close()
    (path,) = cache.glob("*.sqlite")
    for damage in (b"", b"no database", path.read_bytes()[: 3 * 4096] + b"\xff" * 40_000):
        path.write_bytes(damage)
        index = updated(run)
        assert len(numbers(index)) == 56 and numbers(index, contains="south")
        index.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 999")
    assert len(numbers(updated(run))) == 56
    assert not list(run.glob("*sqlite*")), "nothing is written into the run"


def test_without_a_cache_that_can_be_written_the_index_is_temporary(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    index = RunIndex(run, tmp_path / "file" / "cache")
    index.update()
    assert len(numbers(index)) == 56
    index.close()
    assert not Path(index._path).exists()


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000, "5", "{}", '{"a": 1e400}', f'{{"step": {"9" * 5000}}}',
        '{"phase": "train"', "\x00", '"\\ud800"',
    ],
)  # fmt: skip
def test_a_line_that_is_no_episode_is_counted_and_left_out(make_run: MakeRun, line: str) -> None:
    run = make_run()
    lines = (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    (run / "episodes.jsonl").write_text("\n".join([*lines[:3], line, *lines[4:]]) + "\n", encoding="utf-8")
    index = updated(run)
    assert numbers(index) == [1, 2, 3, *range(5, 57)]
    state = index.state()
    assert state.faults == 1 and state.fault.startswith("line 4 is not an episode") and "\n" not in state.fault


@pytest.mark.parametrize(("name", "value"), [("step", 2**70), ("member", -(2**64)), ("metrics", {"a": float("nan")})])
def test_numbers_that_no_database_holds_are_no_episode(make_run: MakeRun, name: str, value: Any) -> None:
    run = make_run()
    lines = recorded(run)
    lines[0][name] = value
    lines[1]["task"]["seed"] = 2**70
    lines[2]["group"] = lines[2]["turns"][0]["observation"] = "\ud800"
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    index = updated(run)
    assert index.state().faults == 1 and len(numbers(index)) == 55
    assert numbers(index, seed=2**70) == [2]


def test_failures_are_grouped_by_how_they_ended(run: Path) -> None:
    index = updated(run)
    failed = numbers(index, failed=True)
    for by in ("observation", "error", "stop"):
        groups = failure_groups(index, EpisodeFilter(), by)
        members = [numbers(index, failed=True, **group.filter) for group in groups]
        assert [len(lines) for lines in members] == [group.number for group in groups]
        assert [lines[0] for lines in members] == [group.line for group in groups]
        assert sorted(line for lines in members for line in lines) == failed
    with pytest.raises(ConfigError, match="grouped by observation, error, stop"):
        failure_groups(index, EpisodeFilter(), "reward")


def test_texts_that_differ_in_one_stretch_are_of_one_group() -> None:
    texts = ["The pearl is cursed.", "The red key is cursed.", "Room: hall", "Room: attic", "Taken.", "", "The end"]
    groups = merge_texts(texts)
    assert [groups[text] for text in texts] == [
        "The … is cursed.", "The … is cursed.", "Room: …", "Room: …", "Taken.", "", "The end",
    ]  # fmt: skip


def test_a_filter_names_what_it_does_not_know(run: Path) -> None:
    for value, message in [
        ({"phas": "x"}, "did you mean 'phase'"),
        ({"seed": "5"}, "takes int"),
        ({"failed": 1}, "bool"),
    ]:
        with pytest.raises(ConfigError, match=message):
            filter_from_json(value)
    with pytest.raises(ConfigError, match="no 'rewrd' to sort by: did you mean 'reward'"):
        numbers(updated(run), "rewrd")


def test_an_index_that_another_process_writes_is_read_and_kept(make_run: MakeRun, cache: Path) -> None:
    run = make_run()
    updated(run).close()
    (path,) = cache.glob("*.sqlite")
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("BEGIN IMMEDIATE")
        index = RunIndex(run)
        assert numbers(index) == list(range(1, 57))
        writer.execute("ROLLBACK")
    assert numbers(index, contains="south") != []
